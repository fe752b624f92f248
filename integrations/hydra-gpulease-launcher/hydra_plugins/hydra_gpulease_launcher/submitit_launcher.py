"""The Hydra launcher `submitit_gpulease`: that of hydra-submitit-launcher, if it is installed, with our executor."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

try:
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
except ImportError:  # it is another distribution
    pass
else:

    @dataclass
    class SubmititGpuleaseConf(BaseQueueConf):
        """The options under `hydra.launcher`."""

        _target_: str = "hydra_plugins.hydra_gpulease_launcher.submitit_launcher.SubmititGpuleaseLauncher"

    class SubmititGpuleaseLauncher(BaseSubmititLauncher):
        """Submits the trials of a sweep as jobs of the daemon."""

        _EXECUTOR = "gpulease"

    ConfigStore.instance().store(
        group="hydra/launcher", name="submitit_gpulease", node=SubmititGpuleaseConf, provider="gpulease"
    )
