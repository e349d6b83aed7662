"""Ops: functions with several implementations; the reference body is the definition."""
