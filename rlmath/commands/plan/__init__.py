"""From a model, GPUs and lengths to layouts that fit: ``rlmath plan layout``.

``models.py`` has the sizes, ``gpus.py`` the cards, ``memory.py`` what each phase holds, ``time.py``
how long it takes, ``layouts.py`` the search, ``report.py`` and ``cli.py`` what is printed.
"""
