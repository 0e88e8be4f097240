"""A story from the built-in pair, and how it was generated."""

import dsi

with dsi.Engine.load() as engine:
    completion = engine.generate("Once upon a time", max_new_tokens=60)
    print("Once upon a time" + completion.text)
    accepted, forwards = completion.tally.accepted, completion.tally.forwards
    print(f"{len(completion.tokens)} tokens, {accepted} of them drafted, in {forwards} target forwards")
