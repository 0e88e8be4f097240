"""Text as it is verified; the same seed gives the same text with any algorithm."""

import dsi

with dsi.Engine.load(sp=2) as engine:
    texts = []
    for algorithm in ("nonsi", "dsi"):
        stream = engine.stream("The old clock", max_new_tokens=40, temperature=0.8, seed=5, algorithm=algorithm)
        print(f"{algorithm:>6}:", end="")
        for text in stream:
            print(text, end="", flush=True)
        print()
        texts.append(stream.completion.text)
    print("equal:", texts[0] == texts[1])
