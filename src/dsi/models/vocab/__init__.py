"""Drafters with another vocabulary than the target's."""

SAME, BY_TOKEN, BY_TEXT, AUTO = "same", "tli", "slem", "auto"  # how draft tokens reach the target
VOCAB_METHODS = (SAME, BY_TOKEN, BY_TEXT, AUTO)
