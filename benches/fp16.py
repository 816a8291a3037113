"""Times the fp16 product (cuBLAS through PyTorch) for the shapes and batches of `makaira bench`.

Same protocol: a CUDA graph of 4 to 512 products of about 2.5 ms, weights rotated over at least 560 MB, warm
replays, the median of 7, everything twice, answers checked against f64 on a sample of columns.

    python3 benches/fp16.py --out fp16.json [--shapes 8b_qkv,4096x4096] [--ms 1,8,16,32,64]
"""

import argparse
import json
import math
import statistics
import time

import torch

LAYERS = {
    "8b_qkv": (6144, 4096),
    "8b_o": (4096, 4096),
    "8b_gateup": (28672, 4096),
    "8b_down": (4096, 14336),
    "70b_qkv": (10240, 8192),
    "70b_o": (8192, 8192),
    "70b_gateup": (57344, 8192),
    "70b_down": (8192, 28672),
}
ROTATED_BYTES = 560_000_000
GRAPH_US, WARM_US, REPLAYS, MAX_LAUNCHES = 2500.0, 15000.0, 7, 512


def replays(graph, count):
    """Microseconds of each of `count` replays, one right after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(events, events[1:])]


def capture(weights, x, y, count):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for idx in range(count):
            torch.mm(x, weights[idx % len(weights)].t(), out=y)
    return graph


def measure(weights, m, k, n):
    x = torch.rand(m, k, device="cuda", dtype=torch.float16) * 2 - 1
    y = torch.full((m, n), math.nan, device="cuda", dtype=torch.float16)
    for _ in range(3):
        torch.mm(x, weights[0].t(), out=y)
    columns = torch.randperm(n, device="cuda")[:192]
    exact = x.double() @ weights[0][columns].double().t()
    error = ((y[:, columns].double() - exact).norm() / exact.norm()).item()
    assert not torch.isnan(y).any() and error < 2e-3, f"relative error {error}"
    torch.cuda.synchronize()
    probe = capture(weights, x, y, 16)
    replays(probe, 1)
    guess = replays(probe, 3)[1] / 16
    count = min(max(int(GRAPH_US / guess), 4), MAX_LAUNCHES)
    graph = capture(weights, x, y, count)
    warm = math.ceil(WARM_US / (guess * count))
    runs = [statistics.median(replays(graph, warm + REPLAYS)[warm:]) / count for _ in range(2)]
    return runs, error


def shape_of(text):
    return LAYERS[text] if text in LAYERS else tuple(int(size) for size in text.split("x"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(LAYERS))
    parser.add_argument("--ms", default="1,8,16,32,64")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rows = []
    for name in args.shapes.split(","):
        n, k = shape_of(name)
        copies = min(max(math.ceil(ROTATED_BYTES / (2 * n * k)), 2), MAX_LAUNCHES)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) * 0.05 for _ in range(copies)]
        for m in (int(m) for m in args.ms.split(",")):
            runs, error = measure(weights, m, k, n)
            us = sum(runs) / 2
            rows.append({"shape": name, "n": n, "k": k, "m": m, "us": us, "run_us": runs, "rel_err": error})
            print(f"{name:<11} {m:>4} {us:9.2f} us  {2 * m * n * k / us / 1e6:7.1f} TFLOP/s  {error:.1e}", flush=True)
        del weights
        torch.cuda.empty_cache()
    result = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "unix_time": int(time.time()),
        "rows": rows,
    }
    with open(args.out, "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
