"""`alignkit check`: real engines, each in a process of its own, compared before and after patching."""
