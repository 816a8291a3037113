"""Times the fp16 product (cuBLAS through PyTorch) for the shapes and batches of `makaira bench`.

Same protocol: a CUDA graph of 4 to 512 products of about 2.5 ms, weights rotated over at least 560 MB, a rest,
warm replays, the median of 7, everything twice, answers checked against f64 on a sample of columns and rows.

    python3 benches/fp16.py --out fp16.json [--shapes 8b_qkv,4096x4096] [--ms 1,8,16]

With `--chain 8b,70b` the linear layers of whole models instead, in one graph, every weight distinct and each
product reading its predecessor's output. Weights that do not fit in memory: as many layers as fit, and the
time is scaled to all of them (`layers_timed` of `layers`).

    python3 benches/fp16.py --out fp16-chain.json --chain 8b,70b [--ms 1,16,64] [--gigabytes 100]
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
MODELS = {"8b": 32, "70b": 80}
CELL_MS = "1,2,4,8,16,24,32,48,64,96,128,256,512,1024,4096"
CHAIN_MS = "1,16,64"
ROTATED_BYTES = 560_000_000
GRAPH_US, WARM_US, REPLAYS, MAX_LAUNCHES = 2500.0, 15000.0, 7, 512
REST_S = 0.03


def replays(graph, count):
    """Microseconds of each of `count` replays, one right after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(events, events[1:])]


def capture(products):
    """A graph of products `(x, weight, y)`, y = x weight^T."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, weight, y in products:
            torch.mm(x, weight.t(), out=y)
    return graph


def time_graph(graph):
    """Medians, in microseconds, of two rounds of replays after a rest."""
    replays(graph, 1)
    time.sleep(REST_S)
    warm = math.ceil(WARM_US / replays(graph, 1)[0])
    return [statistics.median(replays(graph, warm + REPLAYS)[warm:]) for _ in range(2)]


def sampled_error(x, weight, y):
    """The relative error of a sample of columns and rows of y."""
    columns = torch.randperm(weight.shape[0], device="cuda")[:192]
    rows = torch.randperm(x.shape[0], device="cuda")[:128]
    exact = x[rows].double() @ weight[columns].double().t()
    error = ((y[rows][:, columns].double() - exact).norm() / exact.norm()).item()
    assert torch.isfinite(y).all() and error < 2e-3, f"relative error {error}"
    return error


def measure(weights, m, k, n):
    x = torch.rand(m, k, device="cuda", dtype=torch.float16) * 2 - 1
    y = torch.full((m, n), math.nan, device="cuda", dtype=torch.float16)
    for _ in range(3):
        torch.mm(x, weights[0].t(), out=y)
    error = sampled_error(x, weights[0], y)

    def products(count):
        return [(x, weights[idx % len(weights)], y) for idx in range(count)]

    guess = math.inf
    for count in (2, 16):
        if math.isinf(guess) or guess * count <= GRAPH_US:
            probe = capture(products(count))
            replays(probe, 1)
            guess = replays(probe, 3)[1] / count
    count = min(max(int(GRAPH_US / guess), 4), MAX_LAUNCHES)
    return [us / count for us in time_graph(capture(products(count)))], error


def chain(name, ms, limit_bytes):
    """Rows of a model's chain."""
    shapes = [LAYERS[f"{name}_{part}"] for part in ("qkv", "o", "gateup", "down")]
    layer_bytes = sum(2 * n * k for n, k in shapes)
    layers = MODELS[name]
    timed = min(layers, limit_bytes // layer_bytes)
    assert timed > 0, f"a layer of {name} has {layer_bytes / 1e9:.1f} GB, --gigabytes allows less"
    # A product keeps the mean square of its input when that of the weights is 1 / inputs.
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.float16) * k**-0.5 for _ in range(timed) for n, k in shapes
    ]
    for m in ms:
        first = torch.rand(m, shapes[0][1], device="cuda", dtype=torch.float16) * 2 - 1
        outputs = [torch.full((m, n), math.nan, device="cuda", dtype=torch.float16) for n, _ in shapes]
        products = []
        for idx, weight in enumerate(weights):
            source = first if idx == 0 else outputs[(idx - 1) % 4]
            products.append((source[:, : weight.shape[1]], weight, outputs[idx % 4]))
        for product in products[:4]:
            torch.mm(product[0], product[1].t(), out=product[2])
        runs = [us * layers / timed for us in time_graph(capture(products))]
        error = max(sampled_error(*product) for product in products[-3:])
        us = sum(runs) / 2
        scaled = "" if timed == layers else f", scaled from {timed} of {layers} layers"
        print(f"chain_{name:<6} {m:>4} {us:9.0f} us  {error:.1e}{scaled}", flush=True)
        yield {
            "shape": f"chain_{name}",
            "m": m,
            "us": us,
            "run_us": runs,
            "layers": layers,
            "layers_timed": timed,
            "launches": len(products),
            "weight_bytes": timed * layer_bytes,
            "rel_err": error,
        }


def cells(name, ms):
    """Rows of one shape."""
    n, k = LAYERS[name] if name in LAYERS else tuple(int(size) for size in name.split("x"))
    copies = min(max(math.ceil(ROTATED_BYTES / (2 * n * k)), 2), MAX_LAUNCHES)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.float16) * 0.05 for _ in range(copies)]
    for m in ms:
        runs, error = measure(weights, m, k, n)
        us = sum(runs) / 2
        print(f"{name:<11} {m:>4} {us:9.2f} us  {2 * m * n * k / us / 1e6:7.1f} TFLOP/s  {error:.1e}", flush=True)
        yield {"shape": name, "n": n, "k": k, "m": m, "us": us, "run_us": runs, "rel_err": error}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(LAYERS))
    parser.add_argument("--chain", default="", help="models, instead of shapes: 8b,70b")
    parser.add_argument("--ms", help=f"batches; {CELL_MS}, of chains {CHAIN_MS}")
    parser.add_argument("--gigabytes", type=float, default=100.0, help="most memory that a chain's weights take")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    ms = [int(m) for m in (args.ms or (CHAIN_MS if args.chain else CELL_MS)).split(",")]
    rows = []
    for name in (args.chain or args.shapes).split(","):
        if args.chain:
            rows += chain(name, ms, int(args.gigabytes * 1e9))
        else:
            rows += cells(name, ms)
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
