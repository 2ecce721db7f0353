"""What a configuration calls its settings."""

import dataclasses


def setting_names(config: type) -> list[str]:
    """Of a configuration and of the groups in it: a group's settings are flags like all others."""
    groups = {
        field.name: field.default
        for field in dataclasses.fields(config)
        if dataclasses.is_dataclass(field.default)
    }
    flat = [field.name for field in dataclasses.fields(config) if field.name not in groups]
    return flat + [field.name for group in groups.values() for field in dataclasses.fields(group)]
