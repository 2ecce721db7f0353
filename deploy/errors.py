"""Errors of the tools.

DeployError
├── ProcessDied       a process of the local cluster ended when it should not have
├── NotReady          the cluster did not become ready in time
├── ModelNotFound     no such model folder, file or package
├── PortTaken         somebody else listens at the port, or nobody may
└── GatewayError      a gateway answered with an error, or not at all
"""


class DeployError(Exception):
    """What the user reads; the tools print it without a traceback."""


class ProcessDied(DeployError):
    pass


class NotReady(DeployError):
    pass


class ModelNotFound(DeployError):
    pass


class PortTaken(DeployError):
    pass


class GatewayError(DeployError):
    pass
