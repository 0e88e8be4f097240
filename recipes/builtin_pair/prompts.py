"""Beginnings that people wrote, many on things that the corpus never mentions."""

PROMPTS = """
Once upon a time
Once upon a time, there was a brave little snail
Tom and his dog
One day a dragon
Lily had a red
In the forest there lived
Ben wanted to
The sun was shining and
Mia found a key under the bed
The old clock on the wall
A tiny robot woke up and
Grandma made a cake with
The moon asked the stars
Max and Anna built a boat
It was raining, so the children
A fish who could not swim
The king lost his crown in
Sara was afraid of the dark because
Two birds sat on a tree and
The train was late, and Sam
"Can I come too?" asked the
Every night, the owl
Jack planted a seed and
The snowman had no nose
""".strip().splitlines()
