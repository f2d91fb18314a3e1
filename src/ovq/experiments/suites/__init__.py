"""The suites, one a file: functions that return an experiment of a scale."""
