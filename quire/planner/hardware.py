"""Hardware: a table of devices with their published rates, and what an engine reaches of these rates.

No figure of the table was measured by quire. Every figure says where it is from, and which page agrees with it. These pages
are of others than the vendors, whose datasheets could not be read; what no page confirms says so. The efficiencies are from
one H100 (quire's own runs, batch sizes 1 to 64); for all other devices they are an assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.base.errors import ConfigError

_NVIDIA_DENSE = "dense rates: half of the rates that NVIDIA states with sparsity"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What an engine reaches of a device's published rates, and the times that no rate explains.

    bandwidth        share of bytes_per_s that a step reaches, above 0 and at most 1
    compute          share of the FLOP/s that a step reaches, above 0 and at most 1
    layer_s          launches and synchronisation per layer and step, in seconds
    few_tokens       steps of up to so many tokens take fused_layer_s per layer in place of layer_s
    fused_layer_s    see few_tokens
    step_s           per step: scheduling, input copies, sampling
    sequence_s       per sequence of a step
    request_s        per request, before its first step: admission, tokens, transport
    collective_s     latency of one all-reduce among devices of a host
    """

    bandwidth: float
    compute: float
    layer_s: float
    few_tokens: int
    fused_layer_s: float
    step_s: float
    sequence_s: float
    request_s: float
    collective_s: float


GPU_EFFICIENCY = Efficiency(0.83, 0.40, 36e-6, 4, 14e-6, 100e-6, 0.0, 0.7e-3, 12e-6)
"""Of one H100 80GB HBM3: 3.08 TB/s of reads and 783 TFLOP/s of bf16 products were measured, of which decode steps reach about
0.9 and prompts about 0.5."""

CPU_EFFICIENCY = Efficiency(0.75, 0.50, 4e-6, 0, 4e-6, 200e-6, 5e-6, 1.0e-3, 5e-6)
"""An assumption; `quire bench steps` measures a machine."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Rates are published peaks, not measurements.

    key              what the option --hardware takes
    bytes_per_s      memory bandwidth
    flops_per_s      dense bf16 products
    fp8_flops_per_s  dense fp8 products; None: the device has none
    memory_bytes     of the device; of a CPU an assumption, see source
    watts            board power, or TDP of a CPU
    link_bytes_per_s between devices of a host, one direction; None: there is no such link
    source           where each figure is from, by field name
    is_measured      whether the rates were measured; never so in the table
    """

    key: str
    name: str
    kind: str
    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float | None
    memory_bytes: int
    watts: float | None
    link_bytes_per_s: float | None
    source: dict[str, str]
    efficiency: Efficiency
    is_measured: bool = False

    @property
    def has_float8(self) -> bool:
        """Whether it multiplies float8, as far as is known: a measured one has no such rate."""
        return self.is_measured or self.fp8_flops_per_s is not None

    def flops_of(self, precision: str) -> float:
        """Return the peak FLOP/s of products with weights of a precision: fp8 has its own rate where the device has one."""
        if precision == "fp8" and self.fp8_flops_per_s is not None:
            return self.fp8_flops_per_s
        return self.flops_per_s

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which the device changes from memory-bound to compute-bound (bf16)."""
        return self.flops_per_s / self.bytes_per_s

    @property
    def label(self) -> str:
        """The name, with "not measured" where that is so."""
        return self.name if self.is_measured else f"{self.name} (published figures, not measured)"


_FIELDS = ("bytes_per_s", "flops_per_s", "fp8_flops_per_s", "memory_bytes", "watts", "link_bytes_per_s")
_NOT_LINK = _FIELDS[:-1]


def _sources(source: str, checks: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return where each figure is from, and the page that agrees with it. checks: fields by the page's address."""
    pages = {name: page for page, names in checks.items() for name in names}
    return {
        name: f"{source}; {f'agrees with {pages[name]}' if name in pages else 'not checked against a page'}" for name in _FIELDS
    }


def _gpu(
    key: str,
    name: str,
    rates: tuple[float, float, float | None],
    memory_gb: float,
    watts: float,
    link_gb_per_s: float | None,
    source: dict[str, str],
) -> Hardware:
    terabytes, teraflops, fp8 = rates
    return Hardware(
        key,
        name,
        "gpu",
        terabytes * 1e12,
        teraflops * 1e12,
        None if fp8 is None else fp8 * 1e12,
        round(memory_gb * 1e9),
        watts,
        None if link_gb_per_s is None else link_gb_per_s * 1e9,
        source,
        GPU_EFFICIENCY,
    )


def _cpu(key: str, name: str, num_channels: int, megatransfers: int, cores_ghz_flops: tuple[int, float, int], watts: float,
         memory_gb: int, page: str) -> Hardware:  # fmt: skip
    """Return a CPU. page: what was checked, and where; all else of its product page was not."""
    cores, ghz, flops_per_cycle = cores_ghz_flops
    bandwidth = num_channels * megatransfers * 8e6
    return Hardware(
        key,
        name,
        "cpu",
        bandwidth,
        cores * ghz * 1e9 * flops_per_cycle,
        None,
        memory_gb * 10**9,
        watts,
        None,
        {
            "bytes_per_s": f"computed: {num_channels} channels of DDR5-{megatransfers}, 8 bytes a transfer; checked: {page}",
            "flops_per_s": f"computed: {cores} cores x {ghz} GHz (base) x {flops_per_cycle} bf16 FLOP a cycle; checked: {page}",
            "memory_bytes": "an assumption about how much is installed; give --memory-gb",
            "watts": f"vendor's product page (TDP); checked: {page}",
        },
        CPU_EFFICIENCY,
    )


_KLOCKWOOD = "https://glennklockwood.com/garden/processors"
_H200_REPORT = "https://github.com/alpharomercoma/MI300X-vs-H200"
_H200_SYSTEM = (
    "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
)

HARDWARE: dict[str, Hardware] = {
    device.key: device
    for device in (
        _gpu("h100", "NVIDIA H100 SXM 80GB", (3.35, 989.4, 1978.9), 80, 700, 450,
             _sources(f"NVIDIA H100 datasheet; {_NVIDIA_DENSE}", {f"{_KLOCKWOOD}/h100": _FIELDS})),
        _gpu("h200", "NVIDIA H200 SXM 141GB", (4.8, 989.4, 1978.9), 141, 700, 450,
             _sources(f"NVIDIA H200 datasheet; {_NVIDIA_DENSE}",
                      {_H200_REPORT: _FIELDS[:3], _H200_SYSTEM: ("memory_bytes", "watts", "link_bytes_per_s")})),
        _gpu("b200", "NVIDIA B200 (HGX)", (8.0, 2250, 4500), 180, 1000, 900,
             _sources(f"NVIDIA HGX B200 datasheet; {_NVIDIA_DENSE}",
                      {f"{_KLOCKWOOD}/B200": (*_FIELDS[:3], "watts", "link_bytes_per_s"),
                       "https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview (179 GB)":
                           ("memory_bytes",)})),
        _gpu("a100", "NVIDIA A100 SXM 80GB", (2.039, 312, None), 80, 400, 300,
             _sources("NVIDIA A100 80GB datasheet", {f"{_KLOCKWOOD}/A100": _FIELDS})),
        _gpu("l40s", "NVIDIA L40S", (0.864, 362.05, 733), 48, 350, 32,
             _sources(f"NVIDIA L40S datasheet; {_NVIDIA_DENSE}; PCIe 4.0 x16",
                      {"https://www.mullet.se/product.html?product_id=355414": _NOT_LINK,
                       "https://www.itcreations.com/nvidia-gpu/nvidia-l40s-gpu-accelerator": ("link_bytes_per_s",)})),
        _gpu("l4", "NVIDIA L4", (0.3, 121, 242.5), 24, 72, 32,
             _sources(f"NVIDIA L4 datasheet; {_NVIDIA_DENSE}; PCIe 4.0 x16",
                      {"https://grokipedia.com/page/NVIDIA_L4_vs_L40S": _NOT_LINK})),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", (1.008, 165.2, 330.3), 24, 450, 32,
             _sources("NVIDIA Ada architecture whitepaper, products with f32 accumulation; PCIe 4.0 x16",
                      {"https://waredb.com/processor/nvidia-geforce-rtx-4090": _FIELDS[:4],
                       "https://holynerdvana.blogspot.com/2022/10/nvidia-geforce-rtx-4090-specifications.html": ("watts",)})),
        _gpu("mi300x", "AMD Instinct MI300X", (5.3, 1307.4, 2614.9), 192, 750, 448,
             _sources("AMD MI300X datasheet; link: 7 Infinity Fabric links of 64 GB/s a direction",
                      {_H200_REPORT: _NOT_LINK, "https://gpu.blog/gpus/instinct-mi300x-mi300x": ("link_bytes_per_s",)})),
        _cpu("xeon-8480", "Intel Xeon Platinum 8480+ (AMX)", 8, 4800, (56, 2.0, 2048), 350, 512,
             "56 cores, DDR5-4800, 350 W by https://notebookcheck.com/Intel-plant-4-Xeon-Generation-mit-56-Kernen-und-"
             "350-Watt-TDP.531338.0.html, before the launch; not: channels, clock, FLOP a cycle"),
        _cpu("epyc-9654", "AMD EPYC 9654 (AVX-512 BF16)", 12, 4800, (96, 2.4, 64), 360, 768,
             "96 cores, 12 channels by https://atizone.it/news/reader.php?objid=33848; not: transfers, clock, FLOP, TDP"),
        _cpu("ryzen-7950x", "AMD Ryzen 9 7950X (AVX-512 BF16)", 2, 5200, (16, 4.5, 64), 170, 64,
             "16 cores, 4.5 GHz, DDR5-5200, 170 W by https://web-autoai.com/articles/amd-ryzen-9-7950x-16-core-32-thread-"
             "high-end-cpu; not: channels, FLOP a cycle"),
    )
}  # fmt: skip


def find_hardware(key: str) -> Hardware:
    """Return a device of the table. Raises ConfigError with the devices that there are."""
    found = HARDWARE.get(key.lower())
    if found is None:
        raise ConfigError(f"--hardware must be one of {', '.join(HARDWARE)}, got {key!r}")
    return found


def with_memory(device: Hardware, memory_gb: float | None) -> Hardware:
    """Return a device with so many gigabytes (1e9 bytes) of memory; None: as in the table. Raises ConfigError."""
    if memory_gb is None:
        return device
    if not (memory_gb > 0 and math.isfinite(memory_gb)):
        raise ConfigError(f"--memory-gb must be a number above 0, got {memory_gb}")
    source = device.source | {"memory_bytes": "--memory-gb"}
    return replace(device, memory_bytes=round(memory_gb * 1e9), source=source)
