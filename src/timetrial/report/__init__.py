"""The page of a run: `timetrial.report.html.write(run_dir)`.

Reads nothing but the files of a run directory, so it knows neither parallel nor train, and a page
can be made again anywhere, later. Importing this package loads neither matplotlib nor jinja2.
"""
