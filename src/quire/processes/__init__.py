"""Child processes: how they start, report, hang, die, and are started again."""
