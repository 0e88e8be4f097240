"""A policy of your own: ten lines, the same text, and a latency to compare it by.

This one is SI that drafts twice as many tokens after a block that was accepted whole.
"""

from dsi import EngineLoop, Latency, Request, Server, SimulatedFleet, ToyDrafter, ToyTarget, Wait, speculative
from dsi.core.generation import Generation, Policy


def doubling(lookahead: int) -> Policy:
    def policy(g: Generation) -> None:
        if g.busy:
            return
        tip = g.tip()
        drafted = tip.depth - g.root.depth
        block = lookahead * (2 if g.tally.drafted == g.tally.accepted + drafted else 1)
        count = min(block - drafted, g.room(tip))
        if count > 0:
            g.draft(tip, count)
        else:
            g.verify(tip, drafted + 1)

    return policy


target = ToyTarget(seed=1)
for name, policy in (("SI", speculative(4)), ("doubling", doubling(4))):
    servers = [Server("target", "target", Wait(target, Latency(20.0)))]
    servers.append(Server("drafter", "drafter", Wait(ToyDrafter(target, acceptance=0.95), Latency(2.0))))
    [completion] = EngineLoop(SimulatedFleet(servers)).run(Request((1, 2, 3), 50, policy))
    print(f"{name}: {completion.elapsed:.0f} ms (simulated), text {hash(completion.tokens) % 1000}")
