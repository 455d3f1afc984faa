"""Images behind URLs, kept byte for byte: `mmdata convert` and img2dataset in turn, from one server on loopback.

    PYTHONPATH=. python docs/benchmarks/urls.py --img2dataset /path/to/its/bin/python [--urls 6000] [--rounds 3]

The server answers after 20 ms, and one request in a hundred fails: a reset, status 500, half a body, or 2 s late.
Each tool checks that images decode; "unchecked" is img2dataset with disable_all_reencoding, which does not.
Both honour X-Robots-Tag; mmdata asks each of the 200 hosts for robots.txt and tdmrep.json too, unless opt-outs are
ignored.
Both may have 128 requests at once, and ask again up to three times. Rates are from the first request for an image to
the last, as the server sees them, so that imports do not count.
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
    bodies, count, span = photos(40), 0, [0.0, 0.0]

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal count
        if request.path == "/span":
            seconds, span[:] = span[1] - span[0], (0.0, 0.0)
            return web.Response(text=json.dumps(seconds))
        if not request.path.endswith(".jpg"):
            return web.Response(status=404)
        span[:] = (span[0] or monotonic(), monotonic())
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
        span[1] = monotonic()
        return web.Response(status=500 if fault == 1 else 200, body=body, content_type="image/jpeg")

    async def run() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", port, backlog=1024).start()
        await asyncio.Event().wait()

    asyncio.run(run())


def run_one(name: str, table: Path, out: Path, python: str) -> tuple[float, int]:
    """Seconds of a tool in all, and the images that it wrote."""
    if name.startswith("mmdata"):
        flags = ["--allow-private-addresses", "--max-bad-share", "0.5", "--shard-rows", "1000"]
        flags += ["--ignore-opt-outs"] if name.endswith("ignored") else []
        command = [sys.executable, "-m", "mmdata", "convert", table, out, *flags]
    else:
        command = [python, "-c", DOWNLOAD, table, out, str(int(name.endswith("unchecked")))]
    began = monotonic()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    seconds = monotonic() - began
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    images = 0
    for path in out.glob("*.tar"):
        with tarfile.open(path) as tar:
            images += sum(member.name.endswith(".jpg") for member in tar)
    return seconds, images


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
    print(f"{'mmdata, from files':24} {count:,} images, {count / (monotonic() - began):,.0f}/s", flush=True)


def span_of(port: int) -> float:
    """Seconds from the first request for an image to the last, since this was asked before."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/span") as answer:
        return json.load(answer)


def fetch_alone(urls: list[str]) -> None:
    """Print the rate at which the stage of the conversion hands on images, and what it costs."""
    from mmdata.convert.fetch import FetchStage
    from mmdata.convert.fetch.settings import FetchSettings
    from mmdata.convert.rows import Row

    began, cpu_s = monotonic(), process_time()
    with FetchStage(FetchSettings(user_agent="benchmark", allow_private_addresses=True)) as stage:
        good = sum(row.fault is None for row in stage(Row(n, "", url) for n, url in enumerate(urls)))
    share, cost = good / len(urls), (process_time() - cpu_s) / len(urls)
    rate = len(urls) / (monotonic() - began)
    print(f"{'mmdata, fetched alone':24} {good:,} images ({share:.2%}), {rate:,.0f}/s, {cost * 1e3:.2f} ms of CPU each")


def main() -> None:
    """Run the tools in turn, and print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--img2dataset", help="Python of an environment that has img2dataset; without, mmdata alone")
    parser.add_argument("--urls", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18_765)
    options = parser.parse_args()
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
            *(["img2dataset", "img2dataset unchecked"] if options.img2dataset else []),
        ]
        for turn in range(options.rounds):
            fetch_alone(urls)
            span_of(options.port)  # the runs below begin anew
            with tempfile.TemporaryDirectory(dir=folder) as files:
                Path(files, "in").mkdir()
                convert_files(options.urls, Path(files, "in"))
            for name in names:
                seconds, images = run_one(name, table, Path(folder, f"{name} {turn}"), options.img2dataset or "")
                span = span_of(options.port)
                share = images / options.urls
                print(
                    f"{name:24} {images:,} images ({share:.2%}), {images / span:,.0f}/s, {seconds:.0f} s in all",
                    flush=True,
                )
    server.terminate()


if __name__ == "__main__":
    main()
