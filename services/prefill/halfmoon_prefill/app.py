"""Run a prefill worker's process."""

from halfmoon_runtime.lifecycle import Service
from halfmoon_workers.prefill.prefill_settings import PrefillSettings
from halfmoon_workers.roles.worker_process import run_worker


async def run(settings: PrefillSettings, service: Service) -> None:
    """Run a prefill worker until the service is told to stop, then finish its requests."""
    await run_worker(settings, service, "prefill")
