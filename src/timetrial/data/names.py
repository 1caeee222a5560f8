"""What data sources are called, without what opens them."""

SOURCE_NAMES = ("c4", "govreport", "sotu", "sotu-before-1900", "sotu-since-1900", "synopses")
"""Keys of `source.SOURCES`, sorted."""
