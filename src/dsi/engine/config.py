"""What an engine is built from: models, devices, fleet. Validated here, before torch is imported.

Importing torch and transformers takes seconds; a mistake in a name or a number is reported at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from dsi.core.fields import option
from dsi.core.spec import AUTO as AUTO_ALGORITHM, GIVEN_UP, SpecConfig
from dsi.engine.devices import Placement, parse_placement
from dsi.models.endpoints.address import EndpointAddress, is_address, parse_address, split_addresses
from dsi.models.names import BUILTIN, NGRAM, check_exists, full_name
from dsi.models.vocab import AUTO, SAME, VOCAB_METHODS

if TYPE_CHECKING:
    from dsi.fleets.ray_actors import ResourceRequest

RAY = "ray"
FLOAT32, INT8 = "float32", "int8"
DTYPES = (FLOAT32, "bfloat16", INT8)
SPEC_FIELDS = tuple(field.name for field in fields(SpecConfig))
DEFAULT_SPEC = SpecConfig(AUTO_ALGORITHM)
NUMBERS = ("lookahead", "min_draft", "max_lead", "max_targets", "tree")  # auto's own
OLD_NAMES = {"texts": "max_num_seqs", "needs": "resources", "patience": "min_draft"}  # kept for one release


@dataclass(frozen=True)
class EngineConfig:
    """The models of an engine and where they run.

    Arguments of `Engine.load` and options of the commands are these fields.
    """

    target: str = option(
        "A model folder, a GGUF file, a name on the hub or in the paper, builtin, or the URL of an engine; repeated, "
        "each URL is a target.",
        BUILTIN,
        repeatable=True,
    )
    drafter: tuple[str, ...] = option("A smaller model, likewise, or ngram; dsi can use several.", (BUILTIN,))
    tokenizer: str | None = option(
        "With URLs, the folder or hub name of the tokenizer; without it, that of the engine's model, or its own.",
        None,
    )
    endpoint_key_file: str | None = option(
        "With URLs, a file with the API key; without it, $DSI_ENDPOINT_API_KEY, if any.", None
    )
    vocab: str = option(
        "How draft tokens reach the target: same tokens or, with another vocabulary, tli (the tokens both "
        "have) or slem (through text). auto: same if it can be, tli if enough is shared, else slem.",
        AUTO,
    )
    sp: int | None = option("SP degree: how many targets. 1, or with devices the fastest.", None)
    target_mp: int = option(
        "MP degree: processes that each target is split over, on its cores; on Ray each asks for the CPUs of "
        "a whole one.",
        1,
    )
    dtype: str = option("float32, bfloat16, or on CPUs int8: weights quantized, with a text of their own.", DTYPES[0])
    exact: bool | None = option(
        "Whether a token's logits must be the same to the bit however its text is cut into forwards, so that every "
        "algorithm writes the same text in every dtype. Without it, wherever that costs nothing.",
        None,
    )
    threads: int | None = option("Threads of each server; without it, one for each of its cores.", None)
    target_devices: str | None = option(
        "GPUs for the targets: cuda:1,cuda:2, slices of one, cuda:0/8, or one target over several, "
        "cuda:1+cuda:2; the CPU without it.",
        None,
    )
    drafter_device: str | None = option("The drafter's GPU, cuda:0; without it, the last of the target devices.", None)
    fleet: str | None = option(
        "Where the servers run: ray starts a Ray cluster here, ray=ADDRESS joins one; without it, processes "
        "on this machine.",
        None,
    )
    target_resources: str | None = option(
        "On Ray, what each target asks for: cpus=2,gpus=1,node=10.0.0.2,label=zone:a.", None
    )
    drafter_resources: str | None = option("On Ray, what the drafter asks for, likewise.", None)
    hang_seconds: float | None = option(
        "How long a server may be silent at its work before it counts as dead; without it, ten times as long as "
        "its slowest forward so far, and at least 2.",
        None,
    )
    start_seconds: float | None = option("On Ray, how long a server may take to come, its model loaded: 120.", None)
    # From Python only.
    resources: Mapping[str, ResourceRequest] = field(default_factory=dict)  # on Ray, by server name or role
    max_num_seqs: int | None = None  # sequences that each server keeps in its KV cache; None: 4
    plan: str | None = None  # auto: measure the pair on this machine's cores and use the fastest configuration

    def __post_init__(self) -> None:
        names = (self.drafter,) if isinstance(self.drafter, str) else tuple(self.drafter)
        object.__setattr__(self, "drafter", names)
        object.__setattr__(self, "target", join_targets(self.target))
        if self.plan is not None:
            self._check_plan()
        check_at_least_1("SP degree", self.sp)
        check_at_least_1("target mp", self.target_mp)
        check_dtype(self.dtype)
        check_at_least_1("threads", self.threads)
        for limit, seconds in (("hang", self.hang_seconds), ("start", self.start_seconds)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{limit} seconds {seconds:g}: must be above 0")
        if self.vocab not in VOCAB_METHODS:
            raise ValueError(f"vocab {self.vocab!r}: must be {', '.join(VOCAB_METHODS[:-1])} or {VOCAB_METHODS[-1]}")
        for name in self.local_models:
            check_exists(full_name(name))
        if self.uses_endpoints:
            self._check_endpoint_options()
        elif self.tokenizer is not None or self.endpoint_key_file is not None:
            name = "tokenizer" if self.tokenizer is not None else "endpoint key file"
            raise ValueError(f"{name}: is for engines behind URLs; leave it out")
        if self.fleet is None:
            self._check_no_ray_options()
        else:
            self._check_ray_options(self.fleet)
        if self.target_devices is not None:
            self._check_device_options(self.target_devices)
        elif self.drafter_device is not None:
            raise ValueError(f"drafter device {self.drafter_device!r}: the targets need devices as well")
        if self.dtype == INT8:
            self._check_int8()

    @property
    def target_endpoints(self) -> tuple[EndpointAddress, ...]:
        """The addresses of the targets; none for a local one."""
        return tuple(parse_address(name) for name in split_addresses(self.target))

    @property
    def uses_endpoints(self) -> bool:
        """Whether a target or drafter is an engine behind a URL."""
        return any(map(is_address, (self.target, *self.drafter)))

    @property
    def local_models(self) -> list[str]:
        """The names of models that are no endpoints."""
        return [name for name in (self.target, *self.drafter) if not is_address(name)]

    def _check_endpoint_options(self) -> None:
        for name in (*split_addresses(self.target), *filter(is_address, self.drafter)):
            parse_address(name)
        least = len(self.target_endpoints) or 1
        if self.sp is not None and (self.sp < least or (not self.target_endpoints and self.sp > 1)):
            raise ValueError(
                f"SP degree {self.sp}: there are {least} targets; a URL can serve several, a local one not"
            )
        given = {
            "target devices": self.target_devices,
            "fleet": self.fleet,
            "plan": self.plan,
            "target mp": self.target_mp > 1,
            "exact": self.exact,
        }
        for option_name, value in given.items():
            if value:
                raise ValueError(f"{option_name}: cannot be used with engines behind URLs; leave it out")
        if self.vocab not in (SAME, AUTO):
            raise ValueError(f"vocab {self.vocab!r}: with engines behind URLs, vocabularies must be the same")

    def check_measurable(self) -> None:
        """Refuse a pair whose forwards cannot be measured."""
        if self.uses_endpoints:
            raise ValueError("engines behind URLs: are measured by dsi plan and dsi compare")
        if NGRAM in (self.target, *self.drafter):
            raise ValueError(f"{NGRAM}: is no model, so there are no forwards to measure")

    @property
    def placement(self) -> Placement:
        """The devices of the servers."""
        return parse_placement(self.target_devices or "", self.drafter_device, self.sp)

    @property
    def ray_address(self) -> str | None:
        """The address of the Ray cluster to join; None to start one."""
        return None if self.fleet is None else parse_fleet(self.fleet)

    @property
    def requested_resources(self) -> dict[str, ResourceRequest]:
        """What servers on Ray ask for, by server name or role."""
        by_role = {"target": self.target_resources, "drafter": self.drafter_resources}
        if not any(by_role.values()):
            return dict(self.resources)
        from dsi.fleets.ray_actors import parse_resources

        return {**self.resources, **{role: parse_resources(text) for role, text in by_role.items() if text is not None}}

    def _check_plan(self) -> None:
        if self.plan != AUTO:
            raise ValueError(f"plan {self.plan!r}: must be {AUTO}")
        if len(self.drafter) > 1 or any((self.sp, self.threads, self.target_devices, self.fleet)):
            raise ValueError(f"plan {self.plan!r}: finds its own arrangement of one drafter; leave the rest out")
        self.check_measurable()

    def _check_ray_options(self, fleet: str) -> None:
        if self.target_devices is not None or self.drafter_device is not None:
            raise ValueError(f"fleet {fleet!r}: takes no devices; say what each server needs instead")
        parse_fleet(fleet)
        if self.exact:
            raise ValueError(f"exact: machines on {fleet} may round differently; leave out one of them")
        _ = self.requested_resources

    def _check_no_ray_options(self) -> None:
        if self.start_seconds is not None:
            raise ValueError(f"start seconds {self.start_seconds:g}: is for servers on Ray; say --fleet ray")
        for role, text in (("target", self.target_resources), ("drafter", self.drafter_resources)):
            if text is not None:
                raise ValueError(f"{role} resources {text!r}: are for --fleet ray")

    def _check_int8(self) -> None:
        gpus = self.target_devices or any(request.gpus for request in self.requested_resources.values())
        if gpus or self.target_mp > 1:
            raise ValueError(f"dtype {INT8!r}: is for whole targets on CPUs; leave out GPUs and target mp")

    def _check_device_options(self, devices: str) -> None:
        if self.target_mp != 1:
            raise ValueError(
                f"target mp {self.target_mp}: on devices a target is spread by its layers, as cuda:0+cuda:1; "
                "leave one of them out"
            )
        if len(self.drafter) > 1 or self.threads is not None:
            raise ValueError(f"target devices {devices!r}: take one drafter, and no threads")
        if self.vocab not in (SAME, AUTO):
            raise ValueError(
                f"vocab {self.vocab!r}: on devices the drafter must have the target's vocabulary; leave them out"
            )
        if self.hang_seconds is not None:
            raise ValueError(
                f"hang seconds {self.hang_seconds:g}: is for servers in processes and on Ray, not on devices"
            )
        if NGRAM in self.drafter:
            raise ValueError(f"{NGRAM}: is no model, and needs no device; leave out the devices to use it")
        _ = self.placement


def join_targets(target: str | Iterable[str]) -> str:
    """The name of a local target, or the addresses of endpoints separated by commas."""
    names = [target] if isinstance(target, str) else list(target)
    if len(names) > 1 and not all(map(is_address, names)):
        raise ValueError(f"{len(names)} targets: must be engines behind URLs, as http://host:8000; a local one has SP")
    return ",".join(names)


def make_configs(
    config: EngineConfig | None, spec: SpecConfig | None, arguments: Mapping[str, Any]
) -> tuple[EngineConfig, SpecConfig]:
    """Split keyword arguments into the fields of the two configurations, and replace those of the ones given."""
    names = {field.name for field in fields(EngineConfig)}
    named = {OLD_NAMES.get(name, name): value for name, value in arguments.items()}
    check_known(named, {*names, *SPEC_FIELDS})
    own = {name: value for name, value in named.items() if name in names and value is not None}
    rest = {name: value for name, value in named.items() if name not in names}
    spec = make_spec(spec or DEFAULT_SPEC, rest)
    return replace(config or EngineConfig(), **own), spec


def make_spec(spec: SpecConfig, arguments: Mapping[str, Any]) -> SpecConfig:
    """Replace fields of a SpecConfig; None leaves one as it is, and `auto` leaves a number to the engine.

    Numbers without an algorithm are for DSI where `auto`, which finds its own, is the default.
    """
    changes = {OLD_NAMES.get(name, name): value for name, value in arguments.items() if value is not None}
    check_known(changes, SPEC_FIELDS)
    for name in ("lookahead", "min_draft"):
        if name in changes:
            changes[name] = parse_number(name, changes[name])
    algorithm = default_algorithm(spec.algorithm, *(changes.get(name) for name in NUMBERS))
    return check_auto(replace(spec, **{"algorithm": algorithm, **changes}))


def default_algorithm(default: str, *numbers: float | None) -> str:
    """The algorithm where none is named: numbers of DSI, if one is given, rule out `auto`, which finds its own."""
    return "dsi" if default == AUTO_ALGORITHM and any(number is not None for number in numbers) else default


def check_known(arguments: Iterable[str], known: Collection[str]) -> None:
    """Refuse a keyword argument that is no field, with the one that was probably meant."""
    for name in arguments:
        if name in GIVEN_UP:
            raise TypeError(f"no longer a keyword argument: {name!r}; trees are faster than runner-ups, use tree")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            advice = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(sorted(known))}"
            raise TypeError(f"unexpected keyword argument {name!r}: {advice}")


def fill_spec(spec: SpecConfig, default: SpecConfig) -> SpecConfig:
    """Fill in what `spec` leaves open from another configuration."""
    names = [name for name in ("lookahead", "min_draft", "max_lead", "max_targets") if getattr(spec, name) is None]
    return check_auto(replace(spec, **{name: getattr(default, name) for name in names}))


def check_auto(spec: SpecConfig) -> SpecConfig:
    """Refuse numbers for `auto`, which chooses its own."""
    for name, number in (("lookahead", spec.lookahead), ("min draft", spec.min_draft), ("tree", spec.tree or None)):
        if spec.algorithm == AUTO_ALGORITHM and number is not None:
            raise ValueError(
                f"{name} {number} with the algorithm {spec.algorithm}: it finds its own; leave one of them out"
            )
    return spec


def parse_number(name: str, value: int | str) -> int | None:
    """A number, or None for `auto`."""
    if value == AUTO:
        return None
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name.replace('_', ' ')} {value!r}: must be a whole number or {AUTO}") from None


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


def check_at_least_1(name: str, number: int | None) -> None:
    if number is not None and number < 1:
        raise ValueError(f"{name} {number}: must be at least 1")


def parse_fleet(fleet: str) -> str | None:
    """The address in `ray=ADDRESS`; None for `ray`, which starts a cluster."""
    kind, _, address = fleet.partition("=")
    if kind != RAY or (address == "" and "=" in fleet):
        raise ValueError(f"fleet {fleet!r}: must be ray, or ray=ADDRESS")
    return address or None
