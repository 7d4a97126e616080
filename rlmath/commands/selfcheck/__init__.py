"""``rlmath selfcheck gpu``: measure one node and leave one file to send.

``catalog.py`` lists the checks, ``checks/`` has a file for each, ``runner.py`` runs each of them in
its own process with a time limit, ``record.py`` is what a check writes to while it runs, and
``report.py`` renders what came out.
"""
