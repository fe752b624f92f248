"""pytest plugin for the suites of jupyter_client: our provisioner takes the place of the local one."""

from __future__ import annotations

import jupyter_client.provisioning

from gpulease.integrations.jupyter_provisioner import GpuleaseProvisioner

jupyter_client.provisioning.LocalProvisioner = GpuleaseProvisioner
