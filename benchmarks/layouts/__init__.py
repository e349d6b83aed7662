"""Which layout of several devices would be fastest, on paper."""
