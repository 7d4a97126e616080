"""Settings of ``runner``: the run: steps, checkpoints, output."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from rlmath.config.profile import ProfileConfig
from rlmath.utils.setting import OnlyWith, setting


@dataclass
class RunnerConfig:
    run_dir: str = setting(MISSING, "Output folder of the run.", common=True)
    steps: int = setting(1000, "Number of training steps (rollouts).", least=1, common=True)
    seed: int = setting(
        0, "Random seed of everything except the data order.", least=0, most=2**32 - 1
    )
    save_every: int = setting(
        50,
        "Save a checkpoint every N steps and after the last; 0: only after the last.",
        least=0,
        common=True,
    )
    keep_checkpoints: int = setting(3, "Number of newest checkpoints to keep.", least=1)
    best_metric: str | None = setting(
        None,
        "Also keep the checkpoint with the best value of this metric, such as eval/accuracy or "
        "eval/aime24/pass_at_8; null: off.",
    )
    best_is_lowest: bool = setting(
        False,
        "The lowest value of best_metric is best.",
        only_with=OnlyWith("best_metric", words="a metric"),
    )
    background_checkpoints: bool | None = setting(
        None, "Write checkpoints in the background from a copy in host memory; null: on CUDA only."
    )
    max_restarts: int = setting(
        3,
        "Maximum number of automatic restarts from the last checkpoint after a rank or engine "
        "failed, without a new checkpoint in between; 0: never restart.",
        least=0,
    )
    resume: str = setting(
        "auto",
        "auto: resume from the newest complete checkpoint in run_dir; never: start over; a "
        "checkpoint folder: resume from it; the URL of a mirrored run, or of a checkpoint in it: "
        "download it to run_dir and resume from it.",
    )
    mirror: str | None = setting(
        None,
        "Upload the run folder while the run trains: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, "
        "hf://buckets/OWNER/BUCKET/FOLDER or file:///FOLDER. Checkpoints, kept as in run_dir, are "
        "complete there by size and checksum; journal/ and replay/ are left out. null: off.",
    )
    mirror_wait_s: float = setting(
        1800.0,
        "After the run, seconds to wait until all is uploaded; if something is missing then, the "
        "exit code is 3.",
        least=0,
        only_with=OnlyWith("mirror", words="a URL"),
    )
    accept_changes: list[str] = setting(
        list,
        "Settings or sections of model.path, algorithm, reward, teacher.path, plugins and "
        "plugin_hashes that a resumed run may change, such as [algorithm.loss,reward]; any other "
        "change of these is an error.",
    )
    samples_keep_gib: float | None = setting(
        None,
        "Remove the oldest steps' files in samples/ when they take more than this many GiB; null: "
        "keep all. Evaluation's samples are always kept.",
        above=0,
    )
    journal_keep_gib: float = setting(
        20.0,
        "Limit of journal/, in GiB: the samples of the steps since the last checkpoint, written as "
        "they finish, so that a run that dies resumes with them; the oldest steps' are removed. 0: "
        "no journal.",
        least=0,
    )
    replay_keep_gib: float = setting(
        20.0,
        "Limit of replay/, in GiB: what each step trained on, so that `rlmath replay` can redo its "
        "update; the oldest steps' are removed. 0: nothing is kept.",
        least=0,
    )
    grace_s: float = setting(
        15.0,
        "On SIGTERM in an update that has changed weights, seconds to wait for the step's end, "
        "where it can be saved. What was sampled is in journal/. 0: never wait.",
        least=0,
    )
    tensorboard_samples: int = setting(
        4, "Sampled responses shown as text in TensorBoard per step.", least=0
    )
    token_samples: int = setting(
        4,
        "Samples per step that are kept token by token in samples/, for the report and `rlmath "
        "why`: log-probs of engine, actor and reference model, entropy, advantage, and what the "
        "update did with it; the first of as many problems, of the same ones in every step that "
        "samples them.",
        least=0,
    )
    check_export_sequences: int = setting(
        4,
        "After the run, compare the actor's log-probs with transformers on the exported model for "
        "this many sequences, the shortest of the last step; above the limit of toolkits/convert "
        "the folder is rejected. Takes 4 bytes of the driver's memory per parameter; skipped, with "
        "a message, where half of what is free is less. 0: off.",
        least=0,
    )
    progress: bool | None = setting(
        None, "Live progress display; null: on if the output is a terminal."
    )
    trackers: list[str] = setting(
        lambda: ["tensorboard"],
        "Where metrics are shown besides metrics.jsonl: tensorboard, wandb, mlflow, trackio, "
        "swanlab, each through its own client, which has to be installed, or your own tracker. One "
        "that fails warns once and never stops the run.",
    )
    tracker_project: str = setting(
        "rlmath",
        "Project of wandb, trackio and swanlab, and experiment of mlflow, that runs are put in.",
    )
    metrics_port: int | None = setting(
        None,
        "Port of a running run's metrics for Prometheus, at /metrics; null or 0: off. "
        "docker/grafana.json is a dashboard of them.",
        least=0,
        most=65535,
    )
    metrics_host: str = setting(
        "127.0.0.1",
        "Address that they are served at; the default is reached from this machine alone, 0.0.0.0 "
        "from anywhere, by anyone.",
        only_with=OnlyWith("metrics_port", words="not null"),
    )
    profile: ProfileConfig = field(default_factory=ProfileConfig)
