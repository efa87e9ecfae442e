"""Name the settings of each role's service."""

from halfmoon_conductor.settings import ConductorSettings
from halfmoon_kvstore.settings import KvstoreSettings
from halfmoon_runtime.settings import ServiceSettings
from halfmoon_workers.decode.decode_settings import DecodeSettings
from halfmoon_workers.prefill.prefill_settings import PrefillSettings

ROLES: dict[str, type[ServiceSettings]] = {
    "conductor": ConductorSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "kvstore": KvstoreSettings,
}
