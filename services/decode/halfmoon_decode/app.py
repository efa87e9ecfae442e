"""Run a decode worker's process."""

from halfmoon_runtime.lifecycle import Service
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.roles.worker_process import run_worker


async def run(settings: DecodeSettings, service: Service) -> None:
    """Run a decode worker until the service is told to stop, then finish its requests."""
    await run_worker(settings, service, "decode")
