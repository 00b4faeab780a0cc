"""``zeroguard stress``: a scenario, or a command of the user's, many times without and with the guards.

One green run of a race is no evidence. What is here repeats, counts, and writes a report with all that another person
needs to judge it. ``command`` is the command line, ``runner`` runs the arms, ``worker`` is the process that one arm of
a scenario runs in, ``jobs`` say what it is told, ``scenarios`` are the programs, ``statistics`` and ``report`` say what
the counts mean, ``environment`` and ``hardware`` where they were made.
"""
