"""Images behind URLs, kept byte for byte: `mmdata convert` and img2dataset in turn, from one server on loopback.

    PYTHONPATH=. python docs/benchmarks/urls.py --img2dataset /path/to/its/bin/python [--urls 6000] [--rounds 3]

The server answers after 20 ms, and one request in a hundred fails: a reset, status 500, half a body, or 2 s late.
Each tool checks that images decode; "unchecked" is img2dataset with disable_all_reencoding, which does not; "header"
reads headers only. "two parts" are two commands at once, `--part 1/2` and `--part 2/2`, and `--finish` after them.
Both honour X-Robots-Tag; mmdata asks each of the 200 hosts for robots.txt and tdmrep.json too, unless opt-outs are
ignored.
Both may have 128 requests at once, and ask again up to three times. Rates are from the first request for an image, as
the server sees it, to the end of the command, so that imports do not count, and all that is done to the images does.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path
from time import monotonic, process_time, sleep

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from aiohttp import web
from PIL import Image

LATENCY_S = 0.02
FAULT_EVERY = 100
LATE_S = 2.0
HOSTS = 200
DOWNLOAD = """
import sys
from img2dataset import download
url_list, out, unchecked = sys.argv[1:]
how = {"disable_all_reencoding": True} if unchecked == "1" else {"resize_mode": "no", "skip_reencode": True}
download(url_list=url_list, input_format="parquet", url_col="url", caption_col="caption", output_folder=out,
         output_format="webdataset", processes_count=2, thread_count=64, retries=3, number_sample_per_shard=1000,
         compute_hash=None, enable_wandb=False, **how)
"""


def photos(count: int) -> list[bytes]:
    """JPEGs of 512×384 pixels, about 60 kB each: smooth noise."""
    made: list[bytes] = []
    for seed in range(count):
        noise = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).resize((512, 384), Image.Resampling.BICUBIC).save(file, "JPEG", quality=92)
        made.append(file.getvalue())
    return made


def serve(port: int) -> None:
    """The server's process."""
    bodies, count, first = photos(40), 0, 0.0

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal count, first
        if request.path == "/first":
            seconds, first = first, 0.0
            return web.Response(text=json.dumps(seconds))
        if not request.path.endswith(".jpg"):
            return web.Response(status=404)
        first = first or monotonic()
        count += 1
        number = int(request.path[1:-4])
        body = bodies[number % len(bodies)] + number.to_bytes(8, "big")  # none is a duplicate
        await asyncio.sleep(LATENCY_S)
        fault = count // FAULT_EVERY % 4 if count % FAULT_EVERY == 0 else -1
        assert request.transport is not None
        if fault == 0:
            request.transport.abort()
        if fault == 2:
            response = web.StreamResponse(headers={"Content-Length": str(len(body))})
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            request.transport.close()
            return response
        await asyncio.sleep(LATE_S if fault == 3 else 0)
        return web.Response(status=500 if fault == 1 else 200, body=body, content_type="image/jpeg")

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", port, backlog=1024).start()
        await asyncio.Event().wait()

    asyncio.run(run())


def run_all(name: str, commands: list[list[object]]) -> None:
    """Run commands at once, to their end."""
    programs = [
        subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for program in programs:
        said = program.communicate()[1]
        if program.returncode:
            raise SystemExit(f"{name}: {said[-2000:]}")


def run_one(name: str, table: Path, out: Path, python: str) -> tuple[float, float, int]:
    """When a tool began and ended, and the images that it wrote."""
    if name.startswith("mmdata"):
        flags = ["--allow-private-addresses", "--max-bad-share", "0.5", "--shard-rows", "1000"]
        flags += ["ignore_opt_outs=true"] if "ignored" in name else []
        flags += ["check=header"] if "header" in name else []
        command = [sys.executable, "-m", "mmdata", "convert", table, out, *flags]
    else:
        command = [python, "-c", DOWNLOAD, table, out, str(int(name.endswith("unchecked")))]
    began = monotonic()
    if "parts" in name:
        run_all(name, [[*command, "--part", part, "--workers", 1] for part in ("1/2", "2/2")])
        command = [*command, "--finish"]
    run_all(name, [command])
    ended = monotonic()
    images = 0
    for path in out.glob("*.tar"):
        with tarfile.open(path) as tar:
            images += sum(member.name.endswith(".jpg") for member in tar)
    return began, ended, images


def convert_files(count: int, folder: Path) -> None:
    """Print the rate at which the same images are converted from files: what decoding and writing take."""
    import torch  # noqa: F401  # here and now, so that its import does not count

    from mmdata.convert import convert

    bodies = photos(40)
    for n in range(count):
        (folder / f"{n}.jpg").write_bytes(bodies[n % len(bodies)] + n.to_bytes(8, "big"))
    table = folder / "t.csv"
    table.write_text("image,caption\n" + "".join(f"{n}.jpg,photo {n}\n" for n in range(count)))
    began = monotonic()
    convert(table, folder.with_name("from files"))
    print(f"{'mmdata, from files':44} {count:,} images, {count / (monotonic() - began):,.0f}/s", flush=True)


def first_request(port: int) -> float:
    """When the first image was asked for since this was asked before, by the clock that all processes share."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/first") as answer:
        return json.load(answer)


def fetch_alone(urls: list[str]) -> None:
    """Print the rate at which the stage of the conversion hands on images, and what it costs."""
    from mmdata.convert.fetch import FetchStage
    from mmdata.convert.fetch.settings import FetchSettings
    from mmdata.convert.sources.rows import InputRow

    began, cpu_s = monotonic(), process_time()
    with FetchStage(FetchSettings(user_agent="benchmark", allow_private_addresses=True)) as stage:
        good = sum(row.fault is None for row in stage(InputRow(n, "", url) for n, url in enumerate(urls)))
    share, cost = good / len(urls), (process_time() - cpu_s) / len(urls)
    rate = len(urls) / (monotonic() - began)
    print(f"{'mmdata, fetched alone':44} {good:,} images ({share:.2%}), {rate:,.0f}/s, {cost * 1e3:.2f} ms of CPU each")


def look_up(urls: int, hosts: int) -> None:
    """Print how often the names of hosts are looked up for simulated URLs, by a name service that takes 5 ms."""
    from aiohttp.abc import AbstractResolver, ResolveResult

    from mmdata.convert.fetch.addresses import CachedResolver, any_address

    asked: Counter[str] = Counter()

    class Names(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
            asked[host] += 1
            await asyncio.sleep(0.005)
            return [ResolveResult(hostname=host, host="192.0.2.1", port=port, family=family, proto=0, flags=0)]

        async def close(self) -> None:
            pass

    async def run() -> None:
        resolver, numbers = CachedResolver(Names(), any_address), iter(range(urls))

        async def some() -> None:
            for number in numbers:
                await resolver.resolve(f"host{number * 7919 % hosts}.example", 80)

        await asyncio.gather(*(some() for _ in range(128)))

    began = process_time()
    asyncio.run(run())
    most, cost = max(asked.values()), (process_time() - began) / urls
    print(f"{urls:,} URLs of {len(asked):,} hosts: at most {most} query a host, {cost * 1e6:.0f} µs of CPU a URL")


def main() -> None:
    """Run the tools in turn, and print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--img2dataset", help="Python of an environment that has img2dataset; without, mmdata alone")
    parser.add_argument("--urls", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18_765)
    parser.add_argument("--look-up", action="store_true", help="only look up names: 10⁶ URLs of 10⁵ hosts")
    options = parser.parse_args()
    if options.look_up:
        look_up(10**6, 10**5)
        return
    server = multiprocessing.Process(target=serve, args=(options.port,), daemon=True)
    server.start()
    sleep(3)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "t.parquet")
        urls = [f"http://127.0.{n % HOSTS}.1:{options.port}/{n}.jpg" for n in range(options.urls)]
        pq.write_table(pa.table({"url": urls, "caption": [f"photo {n}" for n in range(options.urls)]}), table)
        names = [
            "mmdata",
            "mmdata, opt-outs ignored",
            "mmdata, opt-outs ignored, two parts",
            "mmdata, opt-outs ignored, header",
            "mmdata, opt-outs ignored, header, two parts",
            *(["img2dataset", "img2dataset unchecked"] if options.img2dataset else []),
        ]
        for turn in range(options.rounds):
            fetch_alone(urls)
            first_request(options.port)  # the runs below begin anew
            with tempfile.TemporaryDirectory(dir=folder) as files:
                Path(files, "in").mkdir()
                convert_files(options.urls, Path(files, "in"))
            for name in names:
                out = Path(folder, f"{name} {turn}")
                began, ended, images = run_one(name, table, out, options.img2dataset or "")
                rate = images / (ended - first_request(options.port))
                share = images / options.urls
                print(
                    f"{name:44} {images:,} images ({share:.2%}), {rate:,.0f}/s, {ended - began:.0f} s in all",
                    flush=True,
                )
    server.terminate()


if __name__ == "__main__":
    main()
