"""SlowExecutor: a model that is loaded for a very long time."""

import time

from jaxllm.messages import KVCacheInfo
from tests.fakes.fake_cores import AlphabetExecutor


class SlowExecutor(AlphabetExecutor):
    def initialize(self) -> KVCacheInfo:
        time.sleep(3600)
        return super().initialize()
