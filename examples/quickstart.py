"""A story from the built-in pair, and how it was written."""

import dsi

with dsi.Engine.load() as engine:
    done = engine.generate("Once upon a time", max_new_tokens=60)
    print("Once upon a time" + done.text)
    print(
        f"{len(done.tokens)} tokens, {done.tally.accepted} of them guessed, {done.tally.forwards} target forwards"
    )
