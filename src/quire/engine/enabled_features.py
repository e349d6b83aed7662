"""The list of all features, and the objects of those that a configuration uses.

Names modules, which are imported here, when a process needs its features; torch is not. Features are above the engine, which
knows only their base class. Installed packages add features with entry points of the group `quire.features`, each of which
names a class.
"""

from __future__ import annotations

import importlib

from quire.config.engine import Resolved
from quire.engine.feature import Feature
from quire.errors import ConfigError
from quire.plugins import FEATURES, plugin_objects

ALL = (
    "quire.features.data_parallel_experts.feature:DataParallelExpertsFeature",
    "quire.features.expert_balance.feature:ExpertBalanceFeature",
    "quire.features.fair_share.feature:FairShareFeature",
    "quire.features.kv_tiers.feature:KVTiersFeature",
    "quire.features.lora.feature:LoraFeature",
    "quire.features.media.feature:MediaFeature",
    "quire.features.pipeline.feature:PipelineFeature",
    "quire.features.pooling.feature:PoolingFeature",
    "quire.features.profiler.feature:ProfilerFeature",
    "quire.features.prompt_embeds.feature:PromptEmbedsFeature",
    "quire.features.resumed_requests.feature:ResumedRequestsFeature",
    "quire.features.sharded_state.feature:ShardedStateFeature",
    "quire.features.speculation.feature:SpeculationFeature",
    "quire.features.state_checkpoints.feature:StateCheckpointsFeature",
    "quire.features.structured.feature:StructuredFeature",
    "quire.features.thinking.feature:ThinkingFeature",
    "quire.features.trace_replay.feature:TraceReplayFeature",
    "quire.features.transcription.feature:TranscriptionFeature",
)


def enabled_features(resolved: Resolved) -> list[Feature]:
    """New objects of the features that this configuration uses, in the order in which they plug in.

    Raises:
        ConfigError: two features have one name.
    """
    classes = [_load(path) for path in ALL] + _of_plugins()
    features = [kind(resolved) for kind in classes if kind.enabled(resolved)]
    names = [feature.name for feature in features]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two features are called {twice[0]!r}: uninstall one of their packages, or leave it out of QUIRE_PLUGINS"
        )
    return sorted(features, key=lambda feature: (feature.order, feature.name))


def _load(path: str) -> type[Feature]:
    module, _, name = path.partition(":")
    kind: type[Feature] = getattr(importlib.import_module(module), name)
    return kind


def _of_plugins() -> list[type[Feature]]:
    """Raises ConfigError: a plugin's object is no class of features."""
    classes = []
    for name, kind in plugin_objects(FEATURES):
        if not (isinstance(kind, type) and issubclass(kind, Feature)):
            raise ConfigError(
                f"the plugin {name!r} of the group quire.features must name a class derived from"
                " quire.engine.feature.Feature"
            )
        classes.append(kind)
    return classes
