"""The speeds of chips and of the links between them. No device is used.

`Topology.parse("v4:2x4x4")` describes devices. `layout` returns the links that each mesh axis uses, and their speed.
`collective_seconds` is the time that a collective's bytes take there, and `latency_seconds` is its latency. Latency
matters below about 50 kB, so a plan of decoding includes it, and a plan of a training step does not. Collectives of
different axes that run at the same time are assumed not to slow each other down.
"""

import functools
import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from config import MeshConfig
from plan.chips import links
from plan.chips.constants import Constants
from utils import UserError, suggest

MiB, GiB = 2**20, 2**30
# The fraction of a GPU's memory that JAX reserves at start. A program cannot use more, unless XLA_CLIENT_MEM_FRACTION
# (in older versions XLA_PYTHON_CLIENT_MEM_FRACTION) is set: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
GPU_SHARE = 0.75
# The fraction of NVLink's data-sheet speed that collectives reach: 370 of 450 GB/s on 8 H100, with 10 GB per message.
# https://jax-ml.github.io/scaling-book/gpus, "Empirical measurements"
NVLINK_MEASURED = 0.82
# Latency from a chip to the next: https://jax-ml.github.io/scaling-book/sharding, on arrays bound by latency.
HOP_S = 1e-6
# NCCL's estimates for a ring with the LL protocol (for few bytes): at the start, per step inside a node, and per step
# to another node: https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, baseLat and hwLat.
NCCL_BEGIN_S, NVLINK_STEP_S, NETWORK_STEP_S = 6.6e-6, 0.6e-6, 2.7e-6


@dataclass(frozen=True)
class Chip:
    """One JAX device, which is a chip or a part of one. Bytes per second are for one direction."""

    key: str  # the start of a topology's name: v4 in v4:2x4x4
    name: str
    device_kind: str  # as JAX reports it
    peak_flops_per_s: float | None  # bf16, dense; None: unknown, so there is no MFU
    memory_bytes: int | None  # available to a program; None: devices share this machine's memory
    hbm_bytes_per_s: float | None
    torus_dims: int  # 0: no torus
    link_bytes_per_s: float | None  # TPU: one link to one neighboring chip; GPU: all NVLinks of one GPU
    dcn_bytes_per_s: float | None  # to other slices or nodes, per device: data center network, or InfiniBand
    most: int = 0  # chips of the largest slice; 0: no limit
    devices_per_chip: int = 1
    inside_bytes_per_s: float | None = None  # between two devices of one chip
    domain: int = 0  # number of GPUs connected by NVLink: a node, or a rack; 0: no NVLink
    in_use: int = 0  # of a domain's GPUs in most runs, which keep the others as spares; 0: all
    per_host: int = 4  # chips per host
    fp8: bool = False  # has FP8 matmuls, which are twice as fast

    @property
    def side(self) -> int:
        """Number of chips along each side of a full pod, if pods are square."""
        return math.isqrt(self.most)


# FLOP/s: https://cloud.google.com/tpu/docs/v4 and v5e, v5p, v6e, tpu7x; NVIDIA's data sheets of A100, H100, H200 SXM,
# HGX B200 and GB200 NVL72, not sparse; all that list FP8 have twice the FLOP/s there (H100 1,979e12, TPU7x 4,614e12).
# Memory: the limit that libtpu 0.0.42 reports when a program does not fit; GPUs: what `nvidia-smi` prints, in MiB,
# times GPU_SHARE (A100, H100: https://github.com/modal-labs/modal-client/pull/2797, which is the data sheets' 80 GB;
# B200: https://github.com/NVIDIA/TensorRT-LLM/issues/10278).
# HBM, links, DCN: https://jax-ml.github.io/scaling-book/tpus, "TPU Specs". For links, an earlier edition and Google's
# pages have 5e10 for v5e and 1e11 for v5p and v6e; Google's page also has 1e11 for tpu7x (1,200 GB/s of six links).
# Largest slices: https://cloud.google.com/tpu/docs/v5p: 6,144 chips, 16x16x24, of a pod of 8,960.
# v3: https://cloud.google.com/tpu/docs/v3 (a device has half of a chip's 123 TFLOP/s and 900 GB/s); a pod's 340 TB/s of
# all-reduces are 4 links of 8.3e10 on 1,024 chips; memory: 530 MB of 16 GiB are reserved. The speed between a chip's
# two devices is not published, so a link's is assumed. DCN: not known.
# Between tpu7x's two devices: 1.2 TB/s both ways, six times a link: https://github.com/jax-ml/jax/pull/39340.
# NVLink (18 links of 25e9, Blackwell 50e9), domains and InfiniBand (400 Gbit/s per GPU):
# https://jax-ml.github.io/scaling-book/gpus, "Networking"; for A100 (12 links, 200 Gbit/s) NVIDIA's data sheet of DGX
# A100.
CHIPS = {chip.key: chip for chip in (
    Chip("v3", "TPU v3", "TPU v3", 61.5e12, round(15.48 * GiB), 4.5e11, 2, 8.3e10, None, most=1024, devices_per_chip=2,
         inside_bytes_per_s=8.3e10),
    Chip("v4", "TPU v4", "TPU v4", 275e12, round(30.75 * GiB), 1.2e12, 3, 4.5e10, 6.25e9, most=4096),
    Chip("v5e", "TPU v5e", "TPU v5 lite", 197e12, round(15.75 * GiB), 8.1e11, 2, 4.5e10, 3.125e9, most=256),
    Chip("v5p", "TPU v5p", "TPU v5", 459e12, round(95.74 * GiB), 2.8e12, 3, 9e10, 6.25e9, most=6144),
    Chip("v6e", "TPU v6e", "TPU v6 lite", 918e12, round(31.25 * GiB), 1.6e12, 2, 9e10, 12.5e9, most=256),
    # Ironwood: a device has half of a chip's 2,307 TFLOP/s, 7.38 TB/s and 100 Gbit/s.
    Chip("tpu7x", "TPU7x", "TPU7x", 1153.5e12, round(94.75 * GiB), 3.69e12, 3, 9e10, 6.25e9, most=9216,
         devices_per_chip=2, inside_bytes_per_s=6e11, fp8=True),
    Chip("a100", "NVIDIA A100", "NVIDIA A100-SXM4-80GB", 312e12, round(GPU_SHARE * 81_920 * MiB), 2.039e12, 0, 300e9,
         25e9, domain=8, per_host=8),
    Chip("h100", "NVIDIA H100", "NVIDIA H100 80GB HBM3", 989e12, round(GPU_SHARE * 81_559 * MiB), 3.35e12, 0, 450e9,
         50e9, domain=8, per_host=8, fp8=True),
    Chip("h200", "NVIDIA H200", "NVIDIA H200", 989e12, round(GPU_SHARE * 143_771 * MiB), 4.8e12, 0, 450e9, 50e9,
         domain=8, per_host=8, fp8=True),
    Chip("b200", "NVIDIA B200", "NVIDIA B200", 2250e12, round(GPU_SHARE * 183_359 * MiB), 8e12, 0, 900e9, 50e9,
         domain=8, per_host=8, fp8=True),
    Chip("gb200", "NVIDIA GB200 NVL72", "NVIDIA GB200", 2500e12, round(GPU_SHARE * 189_471 * MiB), 8e12, 0, 900e9, 50e9,
         domain=72, in_use=64, per_host=4, fp8=True),
    Chip("cpu", "this machine", "cpu", None, None, None, 0, None, None),
)}  # fmt: skip
PEAK_FLOPS_PER_S = {chip.device_kind: chip.peak_flops_per_s for chip in CHIPS.values() if chip.peak_flops_per_s}


# Devices --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """Connected chips: a TPU slice, GPU nodes, or the simulated devices of a CPU."""

    chip: Chip
    shape: tuple[int, ...]  # sizes of the torus, x first; for GPUs and CPUs their number
    chips: int  # of all slices
    hosts: int
    slices: int = 1  # TPU slices of this shape, joined by the data center network
    constants: Constants | None = None  # of a recorded run on this chip, which lengthen those in `measured.py`
    trainer: str = ""  # whose constants to use on GPUs; empty: any trainer
    speeds: object = None  # a `measured.Speeds` to use in place of the fitted ones
    fp8: bool = False  # the matmuls of layers with weights are in FP8

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parse `v4:2x4x4`, `v5e:4x4`, `4*v5p:4x4x8` (4 slices), `h100:16` or `16*h100` (16 nodes), or `cpu:8`.

        The sizes of a slice may be in any order, see `cloud`. Raises: UserError that suggests a valid topology.
        """
        refuse = lambda why: UserError(f"topology {text!r}: {why}")
        number, times, rest = text.strip().lower().replace("gb200-nvl72", "gb200").rpartition("*")
        if times:
            return cls._parse_several(number.strip(), rest.strip(), refuse)
        key, _, rest = rest.partition(":")
        if re.fullmatch(r"(v3|v4|v5p)-\d+", key):
            raise refuse("slice names count cores on v3, v4 and v5p; give the shape in chips: v3-8 is v3:2x2, v4-64 is "
                         "v4:2x4x4")  # fmt: skip
        if re.fullmatch(r"(v5e|v5litepod|v6e)-\d+", key):
            raise refuse("slice names give no shape; write it in chips: v5litepod-64 is v5e:8x8, v6e-32 is v6e:4x8")
        if key not in CHIPS:
            near = "Ironwood is tpu7x" if key in ("ironwood", "v7", "v7x", "tpu7") else suggest(key, CHIPS)
            gpus = next((one for one in CHIPS.values() if one.domain and one.key in re.split("[x-]", key)), None)
            if gpus and (n := re.sub(rf"{gpus.key}|[x-]", "", key)).isdecimal():
                near = f"{n} GPUs are {gpus.key}:{n}, and {n} nodes of {gpus.domain} are {n}*{gpus.key}"
            raise refuse(f"unknown chip {key!r}; {near}; write v4:4x4x2, v5e:4x4, h100:16 or cpu:8")
        if rest.endswith("_twisted"):
            raise refuse(f"twisted tori are not supported; use {key}:{rest.removesuffix('_twisted')}, without a twist")
        chip, dims = CHIPS[key], CHIPS[key].torus_dims
        shape = tuple(map(int, rest.split("x"))) if re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", rest) else ()
        if len(shape) != max(dims, 1):
            example = {0: "8", 2: "4x4", 3: "4x4x4"}[dims]
            raise refuse(f"{chip.name} takes {dims or 'one'} size{'s' if dims else ''}, like {key}:{example}")
        if not dims:
            (n,), nodes = shape, [size for size in (chip.domain, chip.in_use) if size]
            if nodes and n > chip.domain:
                whole, of = [size for size in nodes if n % size == 0], " or ".join(map(str, nodes))
                if not whole:
                    less, more = max(n - n % size for size in nodes), min(n + -n % size for size in nodes)
                    raise refuse(f"{chip.name}s come in nodes of {of}, and {n} is not a multiple of {of}; use "
                                 f"{key}:{less} or {key}:{more}")  # fmt: skip
                chip = replace(chip, domain=whole[0])
            return cls(chip, shape, n, hosts=-(-n // chip.per_host) if nodes else 1)
        sizes = cls(chip, shape, math.prod(shape), 0).cloud.shape
        bound, also = (chip.side, f" and at most {chip.side}") if dims == 2 else (chip.most, "")
        fits = tuple(min(size + size % 2, bound) for size in sizes[:2]) + sizes[2:]
        # v5e and v6e also have hosts of 1 and 8 chips, each a separate slice: ct5lp-hightpu-1t, ct6e-standard-8t, ..
        # https://cloud.google.com/tpu/docs/v5e and v6e, "VM types"
        one_host = chip.most == 256 and sizes in ((1, 1), (2, 4))
        if fits != sizes and not one_host:
            near = cls(chip, fits, 0, 0).cloud
            raise refuse(f"a host has 2x2 chips, so two sizes must be even{also}; use {near}")
        chips = math.prod(shape)
        if chips > chip.most:
            raise refuse(f"{chips:,} chips exceed the largest slice of {chip.name}, which has {chip.most:,}")
        return cls(chip, shape, chips, hosts=1 if one_host else chips // chip.per_host)

    @classmethod
    def _parse_several(cls, number: str, rest: str, refuse) -> "Topology":
        """Parse `rest`, and return `number` of it: TPU slices, or GPU nodes."""
        key = rest.partition(":")[0]
        if not rest or not re.fullmatch(r"[1-9]\d{0,4}", number):
            raise refuse("N*SLICE is N slices of TPUs, and N*GPU is N nodes of GPUs; write 4*v5p:4x4x8 or 16*h100")
        chip, n = CHIPS.get(key), int(number)
        if chip and chip.domain:
            nodes = {f"{key}:{size}": size for size in (chip.domain, chip.in_use)} | {key: chip.domain}
            if rest not in nodes:
                raise refuse(f"a node of {chip.name} has {chip.domain} GPUs; use {n}*{key} or {key}:{n * chip.domain}")
            return replace(cls.parse(f"{key}:{n * nodes[rest]}"), chip=replace(chip, domain=nodes[rest]))
        one = cls.parse(rest)
        if n > 1 and not one.chip.dcn_bytes_per_s:
            raise refuse(f"the speed of the network between slices is unknown for {one.chip.name}; use {one}")
        return replace(one, chips=n * one.chips, hosts=n * one.hosts, slices=n)

    def __str__(self) -> str:
        return f"{self.slices}*" * (self.slices > 1) + f"{self.chip.key}:{'x'.join(map(str, self.shape))}"

    @property
    def one_slice(self) -> "Topology":
        return replace(self, chips=self.chips // self.slices, hosts=self.hosts // self.slices, slices=1)

    @property
    def devices(self) -> int:  # of JAX
        return self.chips * self.chip.devices_per_chip

    @property
    def order(self) -> list[int]:
        """The torus axes in Google Cloud's order: smallest first, but the 2x2 chips of a host are on the first two."""
        return sorted(range(len(self.shape)), key=lambda d: (self.shape[d] % 2, self.shape[d]))

    @property
    def cloud(self) -> "Topology":
        """The same slice with axes in the order of Google Cloud's name, which is also that of chip coordinates.

        Source: https://cloud.google.com/tpu/docs/types-topologies, "AxBxC, where A<=B<=C".
        """
        return replace(self, shape=tuple(self.shape[d] for d in self.order))

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each torus axis, whether a wraparound link connects its last chip to the first.

        On v4, v5p and tpu7x, optical switches connect cubes of 4x4x4 chips, so all axes wrap around or none: 2x4x4 has
        no wraparound links.
        On v3, v5e and v6e an axis has wraparound links if it spans the pod.
        Source: https://jax-ml.github.io/scaling-book/tpus, "TPU Networking"; https://cloud.google.com/tpu/docs/v5p
        """
        if self.chip.torus_dims == 3:
            return (all(size % 4 == 0 for size in self.shape),) * 3
        return tuple(self.chip.torus_dims == 2 and size == self.chip.side for size in self.shape)

    @property
    def torus(self) -> links.Torus:
        return links.Torus(self.shape, self.wraps)


def topology_of_devices(devices) -> Topology | None:
    """Return the topology of these JAX devices, from which a plan gets their speed; None if it is unknown."""
    chip = next((chip for chip in CHIPS.values() if chip.device_kind == devices[0].device_kind), None)
    if chip is None or not chip.peak_flops_per_s:
        return None
    shape, several = (len(devices),), ""
    if chip.torus_dims:
        several = f"{len({getattr(device, 'slice_index', 0) for device in devices})}*"
        places = np.array([device.coords[: chip.torus_dims] for device in devices])
        shape = tuple(places.max(0) - places.min(0) + 1)
    try:
        found = Topology.parse(f"{several}{chip.key}:{'x'.join(map(str, shape))}")
    except UserError:
        return None
    return found if found.devices == len(devices) else None


@dataclass(frozen=True)
class NamedMesh:
    """A mesh with axes of any names. All functions below accept it in place of a MeshConfig."""

    pairs: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> "NamedMesh":
        """Parse `data=4,model=8`, outermost axis first. Raises: UserError with the part that cannot be parsed."""
        pairs = [part.strip().partition("=")[::2] for part in text.split(",")]
        for name, size in pairs:
            if not name.isidentifier() or not re.fullmatch(r"[1-9]\d{0,6}", size):
                raise UserError(f"mesh {text!r}: {name}={size} should be AXIS=SIZE, with a size of at least 1: "
                                "data=4,model=8")  # fmt: skip
            if [one for one, _ in pairs].count(name) > 1:
                raise UserError(f"mesh {text!r}: axis {name!r} is given twice")
        return cls(tuple((name, int(size)) for name, size in pairs))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.pairs)

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.pairs)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.pairs)


def named_mesh(sizes: dict[str, int]) -> NamedMesh:
    return NamedMesh(tuple(sizes.items()))


@functools.lru_cache(maxsize=64)
def coordinates(mesh: MeshConfig | NamedMesh, topology: Topology) -> np.ndarray:
    """Return the torus coordinates of each device of the mesh, [*mesh sizes, torus axis].

    If a chip is several devices, the last coordinate is the device's index on the chip: [*mesh sizes, torus axes + 1].
    JAX chooses the arrangement, in the same call that `compiled.topology_mesh` makes for real devices.
    Raises: UserError for a mesh that JAX cannot place on the topology.
    """
    from jax.experimental import mesh_utils

    shape, chip, cloud = tuple(mesh.sizes.values()), topology.chip, topology.cloud.shape
    device = lambda place, core: SimpleNamespace(coords=(*place, 0)[:3], core_on_chip=core,
                                                 device_kind=chip.device_kind, platform="tpu")  # fmt: skip
    # In libtpu's order, x first. On small slices of tpu7x JAX uses this order, not the coordinates.
    cores = range(chip.devices_per_chip)
    devices = [device(place[::-1], core) for place in np.ndindex(cloud[::-1]) for core in cores]
    try:
        arranged = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (TypeError, ValueError) as error:  # e.g. an axis of 28 in jax 0.10.2: github.com/jax-ml/jax/issues/38286
        raise UserError(f"JAX cannot place {mesh} on {topology}; use mesh axes whose sizes are products of the sizes "
                        f"{', '.join(map(str, topology.shape))}") from error  # fmt: skip
    places = np.array([(*device.coords[: len(cloud)], device.core_on_chip) for device in arranged.flat])
    back = [*np.argsort(topology.order), len(cloud)][: len(cloud) + (chip.devices_per_chip > 1)]
    return places[:, back].reshape(*shape, -1)


# Links ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The physical links of one mesh axis. Bytes per second are what one device sends; None if unknown."""

    bytes_per_s: float | None  # in all-gather, reduce-scatter, all-reduce
    hops: int  # number of links from a device to the next in its group; this many groups share each link
    ring: bool  # all its torus axes have wraparound links, or the last device is a neighbor of the first
    torus_axes: tuple[str, ...]  # those it uses, of x, y, z
    note: str  # the line to print
    neighbour_bytes_per_s: float | None  # in collective-permute, which sends only to the next device
    all_to_all_bytes_per_s: float | None
    latency_s: float = 0.0  # until the first byte of each device has reached every other device
    nodes: int = 1  # nodes of GPUs that a group spans


def require_devices(mesh: MeshConfig | NamedMesh, topology: Topology) -> None:
    """Raises: UserError if the mesh and the topology differ in their number of devices."""
    if mesh.devices != topology.devices:
        each = topology.chip.devices_per_chip
        chips = f"{topology.chips} chips" if topology.chip.torus_dims else f"{topology.chips}"
        has = f"{topology.devices}, {each} on each of {chips}" if each > 1 else chips
        axis = max(mesh.sizes, key=mesh.sizes.get)
        near, left = divmod(topology.devices * mesh.sizes[axis], mesh.devices)
        raise UserError(f"mesh {mesh} has {mesh.devices} devices, and {topology} has {has}; use axes whose product is "
                        f"{topology.devices}" + f", for example with {axis}={near}" * (not left))  # fmt: skip


def require_one_slice(topology: Topology) -> None:
    """Raises: UserError for several slices, where only training plans know what is sent between them."""
    if topology.slices > 1:
        raise UserError(f"topology {str(topology)!r}: only a plan of a training step can span several slices; "
                        f"use {topology.one_slice}")  # fmt: skip


@functools.cache
def layout(mesh: MeshConfig | NamedMesh, topology: Topology) -> dict[str, Link]:
    """Return the links of each mesh axis of more than one device.

    If there are several slices, these are the links inside a slice, and an entry `mesh.between_slices` follows.
    Raises: UserError if the mesh and the topology differ in their number of devices, or if the axis that spans the
    slices is not a multiple of their number.
    """
    require_devices(mesh, topology)
    if topology.slices > 1:
        inside = layout(mesh.in_slice(topology.slices), topology.one_slice)
        return inside | {mesh.between_slices: _slices_link(mesh, topology)}
    sizes = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    if topology.chip.key == "cpu":
        note = "uses this machine's memory"
        return {axis: Link(None, 1, True, (), f"{axis}={n} {note}", None, None) for axis, n in sizes.items()}
    return {axis: _find(mesh, topology, (axis,)) for axis in sizes}


@functools.cache
def link(mesh: MeshConfig | NamedMesh, topology: Topology, axes: tuple[str, ...]) -> Link:
    """Return the links of groups of devices along several mesh axes, which may be more than those of a single axis."""
    single = len(axes) == 1 or topology.chip.key == "cpu"
    if topology.slices > 1 and not single:
        mesh, topology = mesh.in_slice(topology.slices), topology.one_slice
    return layout(mesh, topology)[axes[0]] if single else _find(mesh, topology, axes)


def _slices_link(mesh: MeshConfig, topology: Topology) -> Link:
    """Return the data center network (DCN) between slices: each device has its share of its host's bandwidth.

    Its latency is not published.
    """
    speed, n, slices = topology.chip.dcn_bytes_per_s, mesh.sizes[mesh.across], topology.slices
    note = f"{mesh.across}={n} spans {slices} slices with {n // slices} in each: data center network, {_speed(speed)}"
    return Link(speed, 1, True, (), note, speed, speed)


def _find(mesh: MeshConfig | NamedMesh, topology: Topology, axes: tuple[str, ...]) -> Link:
    on_torus, n = topology.chip.torus_dims > 0, math.prod(mesh.sizes[axis] for axis in axes)
    # JAX does not reorder GPUs.
    places = coordinates(mesh, topology) if on_torus else np.arange(topology.chips).reshape(*mesh.sizes.values(), 1)
    along = [list(mesh.sizes).index(axis) for axis in axes]
    lines = np.moveaxis(places, along, range(-1 - len(along), -1)).reshape(-1, n, places.shape[-1])
    name = "*".join(axes)
    try:
        found = _link_of_groups(lines.tobytes(), lines.shape, topology)
    except UserError as error:
        raise UserError(str(error).replace(AXIS, name)) from error
    return replace(found, note=found.note.replace(AXIS, name))


AXIS = "<axis>"  # stands for the name of the mesh axes in a link's note, and in errors


@functools.cache
def _link_of_groups(lines_bytes: bytes, shape: tuple[int, ...], topology: Topology) -> Link:
    """Return the link of groups of devices, which many meshes of a search have in common."""
    lines, on_torus = np.frombuffer(lines_bytes, int).reshape(shape), topology.chip.torus_dims > 0
    find = (_torus_link if topology.chip.devices_per_chip == 1 else _shared_link) if on_torus else _switched_link
    latency_s = (_hops_latency if on_torus else _switched_latency)(lines, topology)
    return replace(find(AXIS, lines, topology), latency_s=latency_s)


def check(mesh: MeshConfig, topology: Topology) -> list[str]:
    """List the reasons why this mesh communicates slower than it could on these links, one line each."""
    chip, found = topology.chip, []
    if chip.torus_dims and not any(topology.wraps) and topology.one_slice.chips > 1:
        closed = "all sizes are multiples of 4" if chip.torus_dims == 3 else f"a size is {chip.side}"
        found.append(f"{topology} has no wraparound links (only if {closed}), so an axis sends in one direction only")
    # As libtpu 0.0.42 compiles it (tests/plan/test_tpu.py). On tpu7x, and on one host, it stays a reduce-scatter.
    inside = mesh.in_slice(topology.slices)
    split = [axis for axis, size in inside.sizes.items() if size > 1]
    scatters = chip.torus_dims and chip.devices_per_chip == 1 and topology.one_slice.hosts > 1
    if scatters and (split == ["tensor"] or {*split} <= {"fsdp", "expert", "context"}):
        once = " with work.gather=step" * (chip.key == "v5e" and split != ["tensor"])
        found.append(f"{inside} reduce-scatters over all chips{once}, which libtpu replaces with all-reduces: 2x bytes")
    for axis, link in layout(mesh, topology).items():
        name, speed = f"{axis}={inside.sizes.get(axis)}", _speed(link.bytes_per_s)
        if link.hops > 1:
            found.append(f"{name} neighbors are {link.hops} hops apart: {speed}")
        if axis == "tensor" and not chip.torus_dims and link.bytes_per_s != chip.link_bytes_per_s:
            found.append(f"{name} spans nodes of {chip.domain}: {speed}, not {_speed(chip.link_bytes_per_s)}")
    return found


def chip_notes(topology: Topology) -> list[str]:
    """List what a plan for these chips assumes, one line each."""
    chip = topology.chip
    if chip.domain:
        return [memory_note(chip), f"NVLink speed is {_speed(chip.link_bytes_per_s)}, from the data sheet; "
                f"collectives on 8 H100s reached {NVLINK_MEASURED} of it"]  # fmt: skip
    return [] if chip.devices_per_chip == 1 else [
        f"{topology.chips} chips are {topology.devices} devices, {chip.devices_per_chip} per chip with "
        f"{_speed(chip.inside_bytes_per_s)} between them; all numbers are per device"]  # fmt: skip


def memory_note(chip: Chip) -> str:
    """Return the note on the memory of a GPU that JAX reserves."""
    whole = chip.memory_bytes / GPU_SHARE / GiB
    return f"JAX reserves {GPU_SHARE:.0%} of a GPU's {whole:.1f} GiB; if you set XLA_CLIENT_MEM_FRACTION, use --memory"


def _speed(bytes_per_s: float | None) -> str:
    return "speed unknown" if bytes_per_s is None else f"{bytes_per_s / 1e9:.4g} GB/s"


def _torus_link(axis: str, lines: np.ndarray, topology: Topology) -> Link:
    """Return the links of a mesh axis. `lines` are the coordinates of its groups: [group, device, torus axis].

    - A group whose coordinates form a box gathers along all its torus axes at once, so their speeds add up. With
      wraparound links both directions of a link count, otherwise one, because a chip at the end has one neighbor.
    - A group that uses part of a torus axis has one ring, in both directions (`plan/chips/links.py`).
    - If neighbors in the group are h links apart, h groups interleave and share the links.
    - An all-to-all is limited by the links across the middle of the longest torus axis. They carry a quarter of the
      gathered array in each direction. Each of n devices sends (n - 1) / n^2 of the array.
    Source: https://jax-ml.github.io/scaling-book/sharding, "How long does this take?" and "AllToAll".
    """
    one, n, torus = topology.chip.link_bytes_per_s, lines.shape[1], topology.torus
    used = [d for d in range(lines.shape[-1]) if np.ptp(lines[:, :, d], axis=1).any()]
    after = np.roll(lines, -1, axis=1)
    far = torus.distance(lines, after)
    neighbour = one / _busiest(lines, after, topology)
    ring, hops = n > 2 and (far == 1).all(), int(far[:, :-1].max())
    boxes = [_box(shape) for shape in np.unique(lines - lines.min(axis=1, keepdims=True), axis=0)]
    if None in boxes:
        both_ways = [np.concatenate(pair) for pair in ((lines, lines), (after, np.roll(lines, 1, axis=1)))]
        speed = across = max(neighbour, 2 * one / _busiest(*both_ways, topology)) if n > 2 else neighbour
        where = " and ".join("xyz"[d] for d in used) + ", crosswise"
    else:
        sides = [(topology.shape[d], topology.wraps[d], *boxes[0][d]) for d in used]
        closed = [wraps and count * stride == size for size, wraps, count, stride in sides]
        speeds = [(2 if c else 1) * one / stride for c, (*_, stride) in zip(closed, sides, strict=True)]
        ring, hops, speed = ring or all(closed), max(stride for *_, stride in sides), sum(speeds)
        across = min(s * n / count for s, (*_, count, _) in zip(speeds, sides, strict=True))
        if links.whole_axes(torus, lines) is None:  # the compiler uses one ring through all devices
            speed = one / float(links.gather_load(torus, lines, 1.0).max())
        where = " and ".join(_part(*side) + "xyz"[d] for d, side in zip(used, sides, strict=True))
    near = "neighbors adjacent" if hops == 1 else f"neighbors {hops} hops apart"
    note = f"{axis}={n} maps to {where}: {'ring' if ring else 'no ring'}, {near}, {_speed(speed)}"
    all_to_all = min(speed, 4 * (n - 1) / n**2 * across)
    return Link(speed, hops, bool(ring), tuple("xyz"[d] for d in used), note, neighbour, all_to_all)


def _shared_link(axis: str, lines: np.ndarray, topology: Topology) -> Link:
    """Return the links of a mesh axis if a chip is several devices. `lines` has the coordinates of the groups:
    [group, device, torus axes and index on the chip].

    A group with all devices of its chips communicates as these chips would: each byte passes a chip's links once. A
    group with one device per chip shares the chip's links with the groups of the other devices. The connection inside a
    chip is ignored, because it is six times as fast as the links.
    """
    chip, n, places = topology.chip, lines.shape[1], lines[..., :-1]
    here = int((places[0] == places[0, 0]).all(axis=-1).sum())  # devices of the group on one chip
    if here == n:
        speed = chip.inside_bytes_per_s
        return Link(speed, 1, True, (), f"{axis}={n} stays on a chip: {_speed(speed)}", speed, speed)
    if any((np.unique(group, axis=0, return_counts=True)[1] != here).any() for group in places):
        raise UserError(f"JAX places {axis}={n} on {topology} so that a group has all devices of some chips and one of "
                        "others, which the planner does not model; use axes that are powers of two")  # fmt: skip
    firsts = [np.sort(np.unique(group, axis=0, return_index=True)[1]) for group in places]
    chips = np.stack([group[first] for group, first in zip(places, firsts, strict=True)])
    link = _torus_link(axis, chips if here > 1 else chips[lines[:, 0, -1] == 0], topology)
    side_by_side = (places[:, ::here] == places[:, here - 1 :: here]).all()
    gather, step = here / chip.devices_per_chip, (1 if side_by_side else 1 / here) * here / chip.devices_per_chip
    sent = lambda count: (count - 1) / count**2  # fraction of the gathered array that a device sends in an all-to-all
    across = link.all_to_all_bytes_per_s * gather * sent(n) / sent(n // here)
    where = link.note.removeprefix(f"{axis}={n // here} maps to ").rpartition(", ")[0]
    which = "both devices" if here > 1 else "one device"
    note = f"{axis}={n} maps to {which} of each chip of {where}, {_speed(gather * link.bytes_per_s)}"
    return replace(link, bytes_per_s=gather * link.bytes_per_s, note=note, all_to_all_bytes_per_s=across,
                   neighbour_bytes_per_s=step * link.neighbour_bytes_per_s)  # fmt: skip


def _part(size: int, _wraps: bool, count: int, stride: int) -> str:
    """Describe which chips of a torus axis a group uses: `count` chips, `stride` apart."""
    share = {1: "", 2: "half of "}.get(size // count // stride, f"1/{size // count // stride} of ")
    return {1: "", 2: "every 2nd of "}.get(stride, f"every {stride}th of ") + share


def _box(group: np.ndarray) -> list[tuple[int, int]] | None:
    """Return (number of chips, distance) of a group along each torus axis; None if it does not form a box."""
    places = [np.unique(along) for along in group.T]
    gaps = [set(np.diff(values).tolist()) or {1} for values in places]
    fills = math.prod(map(len, places)) == len(group) and all(len(gap) == 1 for gap in gaps)
    return [(len(values), *gap) for values, gap in zip(places, gaps, strict=True)] if fills else None


def _busiest(start: np.ndarray, end: np.ndarray, topology: Topology, sizes=1.0) -> float:
    """Return the largest total size on one direction of a link, if all `start` send to their `end` at once."""
    return float(topology.torus.loads(start, end, sizes).max()) or 1.0


def _switched_link(axis: str, lines: np.ndarray, topology: Topology) -> Link:
    """Return the links of a mesh axis of GPUs. `lines` are the GPU indices of its groups: [group, device, 1].

    Inside a node (the GPUs connected by NVLink) every GPU reaches every other at full speed. A group that spans nodes
    uses the NICs of all its GPUs in each node together.
    Source: https://jax-ml.github.io/scaling-book/gpus, "How Do Collectives Work on GPUs?"
    """
    chip, n = topology.chip, lines.shape[1]
    nodes = max(len(np.unique(group // chip.domain)) for group in lines)
    if nodes == 1:
        inside = chip.link_bytes_per_s
        return Link(inside, 1, True, (), f"{axis}={n} stays in a node: NVLink, {_speed(inside)}", inside, inside)
    here = -(-n // nodes)  # devices of the group in one node
    card, speed = chip.dcn_bytes_per_s, min(chip.link_bytes_per_s, here * chip.dcn_bytes_per_s)
    note = f"{axis}={n} spans {nodes} nodes with {here} in each: InfiniBand, {_speed(speed)}"
    return Link(speed, 1, True, (), note, card, card * (n - 1) / (n - here), nodes=nodes)


def _hops_latency(lines: np.ndarray, topology: Topology) -> float:
    """Return the latency from one end of a group to the other, along all torus axes. `lines`: as in `_torus_link`.

    Two devices on the same chip count as one hop apart.
    """
    sizes, wraps = topology.shape, topology.wraps
    span = np.ptp(lines[..., : len(sizes)], axis=1)
    hops = np.where(wraps, np.minimum(span, np.array(sizes) // 2), span).sum(-1).max()
    return HOP_S * max(int(hops), 1)


def _switched_latency(lines: np.ndarray, topology: Topology) -> float:
    """Return the latency of a ring over n GPUs: n - 1 steps. `lines`: as in `_switched_link`."""
    between = max(len(np.unique(group // topology.chip.domain)) for group in lines) - 1
    return NCCL_BEGIN_S + (lines.shape[1] - 1 - between) * NVLINK_STEP_S + between * NETWORK_STEP_S


# Collectives ----------------------------------------------------------------------------------------------------------


def wire_bytes(kind: str, size: float, n: int) -> float:
    """Return the bytes that each of n devices sends in a collective, as in `compile/ledger.py`.

    size  bytes of one device's operand; for an all-gather, of the result
    """
    share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": min(n - 1, 1)}
    return size * share.get(kind, (n - 1) / n)


def collective_seconds(kind: str, size: float, n: int, link: Link) -> float:
    """Return the transfer time, in seconds, of a collective of n devices that runs alone. Latency is not included.

    size  as in `wire_bytes`
    Source: https://jax-ml.github.io/scaling-book/sharding, "What Have We Learned?", which approximates (n - 1)/n by 1.
    """
    speeds = {"all-to-all": link.all_to_all_bytes_per_s, "collective-permute": link.neighbour_bytes_per_s}
    speed = speeds.get(kind, link.bytes_per_s)
    assert speed, f"the speed of this link is not known: {link.note}"
    return wire_bytes(kind, size, n) / speed


def latency_seconds(kind: str, link: Link) -> float:
    """Return the latency of a collective, in addition to its transfer time. An all-reduce is two collectives."""
    return (2 if kind == "all-reduce" else 1) * link.latency_s
