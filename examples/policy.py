"""An algorithm of one's own: ten lines, the same text, and a time to compare it by.

This one is SI that drafts twice as much after a block that was accepted whole.
"""

from dsi import EngineLoop, Latency, Request, Server, SimulatedFleet, ToyDrafter, ToyTarget, Wait, speculative
from dsi.core.generation import Generation, Policy


def eager(lookahead: int) -> Policy:
    def policy(g: Generation) -> None:
        if g.busy:
            return
        tip = g.tip()
        guesses = tip.depth - g.root.depth
        block = lookahead * (2 if g.tally.drafted == g.tally.accepted + guesses else 1)
        wanted = min(block - guesses, g.room(tip))
        if wanted > 0:
            g.draft(tip, wanted)
        else:
            g.verify(tip, guesses + 1)

    return policy


target = ToyTarget(seed=1)
for name, policy in (("SI", speculative(4)), ("its eager sister", eager(4))):
    servers = [Server("target", "target", Wait(target, Latency(20.0)))]
    servers.append(Server("drafter", "drafter", Wait(ToyDrafter(target, acceptance=0.95), Latency(2.0))))
    [done] = EngineLoop(SimulatedFleet(servers)).run(Request((1, 2, 3), 50, policy))
    print(f"{name}: {done.elapsed:.0f} ms (simulated), text {hash(done.tokens) % 1000}")
