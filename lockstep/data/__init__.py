"""Rows from hubs, files and generators: finding, reading, filtering, comparing, splitting and writing them.

locate.py, hub.py    a source → files on this machine
sources.py           files and generators → rows
columns.py           rows → prompts and conversations; presets.py knows the columns of known data sets
filters.py           named stages that drop rows, count them and show five
load.py              all of that: open_rows(Data) → Rows
overlap.py, split.py which questions two sets share; which are held out
sets.py, build.py    the data sets of a recipe; files with a manifest
order.py             which questions a step asks
"""
