"""The options that commands share: what each is called, and what its help says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Algorithm = Annotated[str, typer.Option(help="nonsi, si, pearl, dsi or auto; several, with commas.")]
TargetMs = Annotated[float, typer.Option(help="A target forward, in milliseconds.")]
DrafterMs = Annotated[float, typer.Option(help="A drafter forward, in milliseconds.")]
Acceptance = Annotated[float, typer.Option(help="How often a guess is right: 0 to 1.")]
Sp = Annotated[int, typer.Option(help="SP degree: how many target servers.")]
Tokens = Annotated[int, typer.Option(help="Tokens to generate.")]
Seed = Annotated[int, typer.Option(help="Same seed, same texts and guesses.")]
Drafters = Annotated[int, typer.Option(help="Drafter servers, each with errors of its own.")]
Horizon = Annotated[float, typer.Option(help="dsi: how far beyond the sure text a drafter may guess.")]
Pieces = Annotated[int, typer.Option(help="A cancelled forward ends after the current one of so many; 0: at once.")]
Eager = Annotated[
    bool,
    typer.Option(
        help="A target that has answered takes the next waiting job at once, as in a thread pool, or only "
        "when its answer has been handled and stale jobs are gone."
    ),
]
TargetTtftMs = Annotated[float | None, typer.Option(help="The target's first forward over a prompt.")]
DrafterTtftMs = Annotated[float | None, typer.Option(help="The drafter's first forward over a prompt.")]
PerTokenMs = Annotated[float, typer.Option(help="What each further new token adds to a target forward.")]
Jitter = Annotated[
    float, typer.Option(help="Each forward takes evenly up to this share more or less: 0 to 0.99, by seed.")
]
NetworkMs = Annotated[
    float,
    typer.Option(
        help="Delay of a message, each way (virtual time only): of every one, or with nodes of those between machines."
    ),
]
NetworkJitter = Annotated[
    float, typer.Option(help="Each message is delayed evenly up to this share more or less: 0 to 0.99.")
]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Machines over which the servers are spread evenly, at most one for each server; the drafter is "
        "on the first, where the text is put together. Without it, every message takes network-ms."
    ),
]
Requests = Annotated[
    int,
    typer.Option(
        help="Texts at once on the same servers; dsi goes less far ahead the more there are, as in dsi serve."
    ),
]
DrafterCopies = Annotated[int, typer.Option(help="Servers of each drafter, which guess alike; for many requests.")]
FailuresPerHour = Annotated[
    float, typer.Option(help="Of each server, at random; its job is asked for again (virtual time only).")
]
RepairS = Annotated[float, typer.Option(help="Seconds until a server that failed is back, with nothing read.")]
NoticeMs = Annotated[float, typer.Option(help="Milliseconds until a failure is noticed.")]
Contention = Annotated[float, typer.Option(help="Share by which each other busy target slows one (virtual time only).")]
Rule = Annotated[str, typer.Option(help="How guesses are judged: match, reject, block or specinfer; all are lossless.")]
OneCache = Annotated[
    bool, typer.Option(help="Targets fill one cache: none reads what another is reading (virtual time only).")
]
Target = Annotated[str, typer.Option(help="A model folder, a name on the hub or in the paper, or builtin.")]
Drafter = Annotated[
    list[str] | None,
    typer.Option(help="A smaller model, likewise, or ngram; dsi can use several."),
]
Vocab = Annotated[
    str,
    typer.Option(
        help="How guesses reach the target: same tokens or, with another vocabulary, tli (the tokens both "
        "have) or slem (through text). auto: same if it can be, tli if enough is shared, else slem."
    ),
]
OneAlgorithm = Annotated[
    str,
    typer.Option(help="nonsi, si, pearl or dsi, or auto, which learns what pays; the text is the same."),
]
Degree = Annotated[int | None, typer.Option(help="SP degree: how many targets. 1, or with devices the fastest.")]
TargetMp = Annotated[
    int,
    typer.Option(
        help="MP degree: processes that each target is split over, on its cores; on Ray each asks for the "
        "CPUs of a whole one."
    ),
]
TargetDevices = Annotated[
    str | None,
    typer.Option(
        help="GPUs for the targets: cuda:1,cuda:2, slices of one, cuda:0/8, or one target over several, "
        "cuda:1+cuda:2; the CPU without it."
    ),
]
DrafterDevice = Annotated[
    str | None, typer.Option(help="The drafter's GPU, cuda:0; without it, the last of the target devices.")
]
Fleet = Annotated[
    str | None,
    typer.Option(
        help="Where the servers run: ray starts a Ray cluster here, ray=ADDRESS joins one; without it, "
        "processes on this machine."
    ),
]
TargetNeeds = Annotated[
    str | None,
    typer.Option(help="On Ray, what each target asks for: cpus=2,gpus=1,node=10.0.0.2,label=zone:a."),
]
DrafterNeeds = Annotated[str | None, typer.Option(help="On Ray, what the drafter asks for, likewise.")]
HangSeconds = Annotated[
    float | None,
    typer.Option(help="On Ray, how long a server may be silent at its work before it counts as dead: 60."),
]
StartSeconds = Annotated[
    float | None, typer.Option(help="On Ray, how long a server may take to come, its model loaded: 120.")
]
AutoLookahead = Annotated[str, typer.Option(help="Guesses per verification, or auto: measured, by Eq. (1).")]
AutoPatience = Annotated[str, typer.Option(help="Guesses to have before a fresh root is watched, or auto.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Only the likeliest tokens that together reach p.")]
MinP = Annotated[float, typer.Option(help="Only tokens at least this share as likely as the likeliest.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Threads = Annotated[int | None, typer.Option(help="Threads of each server; without it, one for each of its cores.")]
Profile = Annotated[
    Path | None,
    typer.Option(help="Take what is measured from a file of `dsi measure`; what is given here comes first."),
]
Budget = Annotated[
    bool,
    typer.Option(
        "--budget",
        help="The same cores for every algorithm and auto, in arrangements of their own, by prompt class.",
    ),
]
Cores = Annotated[
    int | None,
    typer.Option(help="With --budget: so many cores, simulated if there are fewer; without it, all of them."),
]
Gpus = Annotated[int | None, typer.Option(help="With --budget: so many GPUs instead, simulated from a --profile.")]
BudgetProfile = Annotated[
    Path | None, typer.Option(help="With --gpus: a file of `dsi measure`, which has what one GPU takes.")
]
Scales = Annotated[
    float | None,
    typer.Option(
        help="Where --budget simulates: the share of a target forward, 0 to 1, that is divided among its "
        "processors; 0.8 without it."
    ),
]
BudgetOut = Annotated[
    list[Path] | None, typer.Option(help="With --budget: also write a picture (.svg, .png); repeatable.")
]
Waited = Annotated[bool, typer.Option("--waited", help="Real threads that wait instead of computing.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
