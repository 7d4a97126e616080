"""``rlmath drill``: the user's settings on a tiny model, with silent faults planted on purpose.

What is planted runs in ranks, engines and driver of a real run, from the outside: functions that a
drill sends there replace one method or attribute and put it back. No run imports anything of it.
"""
