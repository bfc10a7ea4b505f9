"""Settings for all tests: the same examples in every run, and few threads.

`pytest --hypothesis-profile=hunt` looks further, with new examples each time.
"""

import torch
from hypothesis import HealthCheck, settings

slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("same", derandomize=True, database=None, max_examples=40, **slow_is_fine)
settings.register_profile("hunt", max_examples=1000, **slow_is_fine)
settings.load_profile("same")

torch.set_num_threads(1)
