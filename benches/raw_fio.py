#!/usr/bin/env python3
"""Raw file, 4 KiB random reads and writes, O_DIRECT: `cobweb bench` and fio's io_uring engine in turn on the same file.

Each round runs both tools with the same number of requests at uniformly random multiples of the block size (fio: norandommap), with a seed of its own per
round and the order changing from round to round. Rates are the tools' own: requests over the time from the first request to the last completion, without
opening the file. The ratio is the median of the rounds' ratios, so that slow drift of the storage does not count; "of medians" is the other way.

usage: raw_fio.py [--rounds N] [--seconds S] [--depths 1,8,32] [--ops read,write] [--size MIB] [--dir DIR] [--json] [COBWEB ...]
COBWEB is a program (default: target/release/cobweb), or NAME=PROGRAM; several are compared with fio in the same rounds.
The file is made once and kept for the next call (--dir): 1 GiB or --size, written throughout.
"""
import argparse, json, os, statistics, subprocess, sys

BLOCK = 4096


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--seconds", type=float, default=0.8, help="about how long one tool's part of a round takes")
    ap.add_argument("--depths", default="1,8,32")
    ap.add_argument("--ops", default="read,write")
    ap.add_argument("--dir", default=os.environ.get("BENCH_DIR", "."))
    ap.add_argument("--size", type=int, default=1024, help="of the file, in MiB")
    ap.add_argument("--json", action="store_true")
    ap.add_argument("cobweb", nargs="*", default=["target/release/cobweb"])
    return ap.parse_args()


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def fio(path, op, depth, count, seed):
    size = os.stat(path).st_size
    job = json.loads(run(["fio", "--name=raw", f"--filename={path}", f"--size={size}", f"--rw=rand{op}", "--norandommap",
                          f"--bs={BLOCK}", f"--iodepth={depth}", "--direct=1", "--ioengine=io_uring", f"--number_ios={count}",
                          f"--randseed={seed}", "--output-format=json"]))["jobs"][0][op]
    if job["total_ios"] != count:
        sys.exit(f"fio made {job['total_ios']} requests instead of {count}")
    return job["iops"]


def cobweb(program, path, op, depth, count, seed):
    result = json.loads(run([program, "bench", "-c", str(count), "-d", str(depth), "-s", str(BLOCK), "--random", str(seed),
                             "-t", "none", "-i", "io_uring", "-f", "raw", "--json"] + (["-w"] if op == "write" else []) + [path]))
    return result["iops"]


def make_file(directory, size):
    """A file without holes and without unwritten extents, so that no request changes metadata."""
    path = os.path.join(directory, "raw_fio.raw")
    if not os.path.exists(path) or os.stat(path).st_size != size:
        run(["fio", "--name=fill", f"--filename={path}", f"--size={size}", "--rw=write", "--bs=1M", "--direct=1",
             "--ioengine=io_uring", "--iodepth=4", "--end_fsync=1"])
    if os.stat(path).st_blocks * 512 < size:
        sys.exit(f"{path} has holes")
    return path


def main():
    args = arguments()
    programs = dict(c.split("=", 1) if "=" in c else ("cobweb", c) for c in args.cobweb)
    path = make_file(args.dir, args.size << 20)
    tools = {"fio": fio} | {name: (lambda p: lambda *a: cobweb(p, *a))(p) for name, p in programs.items()}
    rows = []
    for op in args.ops.split(","):
        for depth in map(int, args.depths.split(",")):
            count = 2000
            count = max(2000, int(fio(path, op, depth, count, 1) * args.seconds))
            # fio makes no more requests than there are blocks.
            count = min(count, (args.size << 20) // BLOCK)
            rates = {name: [] for name in tools}
            for n in range(args.rounds):
                order = list(tools) if n % 2 == 0 else list(tools)[::-1]
                for name in order:
                    rates[name].append(tools[name](path, op, depth, count, 1000 + n))
            for name in programs:
                ratios = [a / b for a, b in zip(rates[name], rates["fio"])]
                rows.append({"op": op, "depth": depth, "requests": count, "rounds": args.rounds, "tool": name,
                             "fio_iops": statistics.median(rates["fio"]), "iops": statistics.median(rates[name]),
                             "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
                             "of_medians": statistics.median(rates[name]) / statistics.median(rates["fio"]),
                             "fio_all": rates["fio"], "all": rates[name]})
                if not args.json:
                    r = rows[-1]
                    print(f"{op:5} depth {depth:2}  fio {r['fio_iops']:8.0f}/s  {name} {r['iops']:8.0f}/s  ratio {r['ratio']:.3f}"
                          f" ({r['ratio_min']:.2f} to {r['ratio_max']:.2f}; of medians {r['of_medians']:.3f})", flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))


main()
