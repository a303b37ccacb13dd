"""Rows from hubs, files and generators: finding, reading, filtering, comparing, splitting and writing them.

locate.py, hub.py    a source → files on this machine
sources.py           files and generators → rows
columns.py           rows → prompts and conversations; presets.py knows the columns of known data sets
filters.py           named stages that drop rows, count them and show five
load.py              all of that: open_rows(Data) → Rows
overlap.py, split.py questions that two sets share; the choice of held-out questions
sets.py, build.py    the data sets of a recipe; files with a manifest
order.py             the questions of each step
"""
