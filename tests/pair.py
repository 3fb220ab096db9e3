"""Two gloo processes, forked from a server that has imported visgen: a new interpreter takes seconds for that."""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch.multiprocessing import start_processes

ROOT = Path(__file__).parents[1]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["visgen.train.main", "visgen.train.shards", "accelerate.commands.launch", "torch._dynamo"]
)


def launch_pair(script: Path, *argv: str, config: str = "cpu2.yaml") -> None:
    """`accelerate launch --config_file configs/accelerate/CONFIG SCRIPT ARGV`; both processes must end well."""
    end_pair(start_pair(script, *argv, config=config))


def start_pair(script: Path, *argv: str, config: str = "cpu2.yaml", said: Path | None = None) -> list[Any]:
    """The two processes of `launch_pair`, under way; what they say goes to the file `said`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [SERVER.Process(target=_run, args=(rank, port, config, str(script), argv, said)) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


def end_pair(processes: list[Any], seconds: float = 240) -> None:
    """Waits for them; if one fails, the other is killed."""
    until = time.monotonic() + seconds
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes) and time.monotonic() < until:
        connection.wait([p.sentinel for p in processes if p.is_alive()], timeout=1)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    assert [p.exitcode for p in processes] == [0, 0], "what they said stands above"


def spawn_pair(work: Callable[..., None], *args: Any) -> None:
    """`work(rank, *args)` in both."""
    start_processes(work, args, nprocs=2, start_method="forkserver")


def _run(rank: int, port: int, config: str, script: str, argv: tuple[str, ...], said: Path | None) -> None:
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    if said is not None:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    for name in [k for k in os.environ if k.startswith("WANDB_")]:
        del os.environ[name]
    words = ["--config_file", f"configs/accelerate/{config}", script]
    os.environ |= prepare_multi_gpu_env(_validate_launch_command(launch_command_parser().parse_args(words))[0])
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    os.environ |= {k: str(v) for k, v in place.items()}
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
