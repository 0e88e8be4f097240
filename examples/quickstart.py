"""A story from the built-in pair, and how it was written."""

import dsi

with dsi.Engine.load() as engine:
    done = engine.generate("Once upon a time", max_new_tokens=60)
    print("Once upon a time" + done.text)
    guessed, forwards = done.tally.accepted, done.tally.forwards
    print(f"{len(done.tokens)} tokens, {guessed} of them guessed, in {forwards} target forwards")
