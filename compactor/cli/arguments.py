"""The table of all commands: names, lines of help and arguments. It imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

from pathlib import Path

from compactor.cli.frame import Command, argument, exclusive_arguments, parse_byte_count, parse_time_ms, whole_number
from compactor.cli.shared_arguments import (
    CLOCK_OPTION,
    DRY_RUN_OPTION,
    FIELD_FORMATS,
    FILE_HELP,
    INT32_MAX,
    PARTITION_ARGUMENT,
    PARTITIONS_ARGUMENT,
    PATTERN_ARGUMENT,
    PRICES_OPTION,
    PROFILE_OPTION,
    REASON_OPTION,
    RUN_ARGUMENT,
    SAMPLED_PARTITIONS,
    TOPIC_ID_ARGUMENT,
    TOPICS_OPTION,
    WATCH_SECONDS,
    parse_offset_or_time,
    parse_topic_id,
)
from compactor.constants import MAX_OFFSET

COMMANDS = (
    Command(
        "demo",
        "compact a generated topic, from import to export",
        "demo.run_demo",
        (
            argument("--dir", metavar="D", type=Path, help="keep everything there to look at (default: a temporary directory)"),
            argument("--tier", metavar="URL", help="make the tier there, in a bucket that is reached as the settings say; it stays"),
        ),
    ),
    Command(
        "import",
        "import sealed segments of a Kafka log directory into the tier",
        "import_.run_import",
        (
            argument(
                "log_dir",
                metavar="LOG_DIR|LOG_ROOT",
                nargs="?",
                type=Path,
                help="a partition's directory (<20 digits>.log and what belongs to them), or one with <topic>-<partition> directories "
                "in it",
            ),
            argument(
                "--from-tier",
                metavar="CONFIG",
                help="in the place of a directory: the configuration of another tier, whose partitions are taken",
            ),
            argument("--topic", metavar="T", help="default: by the directory's name"),
            argument("--partition", type=whole_number(0, INT32_MAX), metavar="P", help="default: by the directory's name"),
            argument("--topics", metavar="REGEX", help="of a LOG_ROOT or another tier: topics whose whole name matches"),
            argument("--live", action="store_true", help="a broker is at work there: its newest segment is left out"),
            argument("--allow-gaps", action="store_true", help="a cleaner took away what is missing between segments"),
            argument(
                "--accept-truncation", action="store_true", help="the tier discards what the broker has discarded after an unclean election"
            ),
            argument(
                "--accept-loss",
                action="store_true",
                help="with --accept-truncation: also where a round beyond the cut cannot be undone, so that some keys lose their last "
                "value",
            ),
            argument(
                "--new-incarnation",
                action="store_true",
                help="the topics were deleted and created again: logs of another topic id get incarnations of their own",
            ),
            REASON_OPTION,
        ),
    ),
    Command(
        "export",
        "write the current view of a partition as a Kafka log directory",
        "export.run_export",
        (
            PARTITION_ARGUMENT,
            TOPIC_ID_ARGUMENT,
            argument(
                "--leader-epoch-zero",
                action="store_true",
                help="for a cluster that has not written the log: leader epoch 0, no producers, and no transaction that is still open",
            ),
            argument("--new-topic-id", metavar="ID", help="with --leader-epoch-zero: id that the topic has in that cluster"),
            argument("folder", metavar="DIR", type=Path, help="must not exist"),
        ),
    ),
    Command(
        "topics",
        "list the partitions that the tier holds",
        "topics.list_topics",
        (),
        (
            Command("delete", "take a partition out of the tier", "topics.delete_topic_partition", (PARTITION_ARGUMENT, REASON_OPTION)),
            Command(
                "delete-records",
                "delete the records of a partition below an offset or a time",
                "topics.run_delete_records",
                (
                    PARTITION_ARGUMENT,
                    argument(
                        "--before",
                        required=True,
                        type=parse_offset_or_time,
                        metavar="OFFSET|TIME",
                        help="an offset, or a time: 2026-01-31T12:00:00Z, '30d ago'",
                    ),
                    REASON_OPTION,
                ),
            ),
            Command(
                "adopt",
                "declare that the tier's log is that of a topic, or continues at an offset",
                "topics.adopt_topic_command",
                (
                    PATTERN_ARGUMENT,
                    exclusive_arguments(
                        argument(
                            "--topic-id", type=parse_topic_id, metavar="ID", help="the topic's id, as kafka-topics --describe prints it"
                        ),
                        argument(
                            "--seam",
                            type=whole_number(),
                            metavar="OFFSET",
                            help="the tier's end + 1, where the next import continues the log",
                        ),
                        required=True,
                    ),
                    REASON_OPTION,
                ),
            ),
            Command("snapshot", "keep a broker tier's metadata, for readers without a broker", "topics.snapshot_metadata"),
        ),
    ),
    Command(
        "cat",
        "print the records of a partition, one per line",
        "cat.print_records",
        (
            PARTITION_ARGUMENT,
            TOPIC_ID_ARGUMENT,
            argument("--from", metavar="N", dest="first", type=whole_number(), default=0, help="first offset"),
            argument("--to", metavar="N", dest="last", type=whole_number(), default=MAX_OFFSET, help="last offset, inclusive"),
            argument("--key", metavar="K", help="only records with this key: text, base64:... or avro:JSON"),
            argument("--isolation", choices=("read_committed", "read_uncommitted"), default="read_committed"),
            argument("--view", choices=("all", "latest"), default="all", help="latest: the last value of each key, deletes left out"),
            argument(
                "--format",
                choices=("table", "json", "raw"),
                help="table: for people; json: a JSON object per line; raw: values only, a newline after each (default: table on a "
                "terminal, else json)",
            ),
            argument("--key-format", choices=FIELD_FORMATS, default="auto", help="how keys are decoded"),
            argument(
                "--value-format",
                choices=FIELD_FORMATS,
                default="auto",
                help="how values are decoded (auto: by [registry], else text, else bytes)",
            ),
        ),
    ),
    Command(
        "status",
        "show how the tier is doing, and which partitions need help",
        "status.show_status",
        (argument("--watch", action="store_true", help=f"show it again every {WATCH_SECONDS} s, until Ctrl-C"),),
    ),
    Command(
        "plan",
        "show what a round would do, and what it would cost",
        "plan.run_plan",
        (
            PARTITIONS_ARGUMENT,
            CLOCK_OPTION,
            argument("--force", action="store_true", help="as `run --force` would"),
            argument(
                "--sample",
                type=parse_byte_count,
                metavar="BYTES",
                help="read so much of each partition and say what compaction saves at least; 0 for nothing (default: 8 MiB of the largest "
                f"{SAMPLED_PARTITIONS} partitions that are due and of which no round is known)",
            ),
            PRICES_OPTION,
        ),
    ),
    Command(
        "run",
        "run one round on each partition that is due",
        "run.run_rounds",
        (
            PARTITIONS_ARGUMENT,
            CLOCK_OPTION,
            argument("--force", action="store_true", help="clean whatever is dirty, whatever the dirty ratio says"),
            PROFILE_OPTION,
        ),
    ),
    Command(
        "recompact",
        "compact whole partitions from the log's start, as a Spark job",
        "recompact.run_recompact",
        (
            PARTITIONS_ARGUMENT,
            CLOCK_OPTION,
            argument(
                "--min-benefit",
                type=whole_number(),
                metavar="BYTES",
                default=1,
                help="leave partitions alone whose round would gain less (default: 1, those that gain nothing)",
            ),
            argument("--force", action="store_true", help="leave none alone, not even clean ones"),
            argument("--dry-run", action="store_true", help="say what would be done, and do nothing; without Spark"),
        ),
    ),
    Command(
        "retire",
        "delete replaced segments whose grace is over, and sweep orphans",
        "retire.run_retire",
        (
            DRY_RUN_OPTION,
            argument(
                "--now",
                "--at",
                type=parse_time_ms,
                metavar="TIME",
                help="stands in for the store's clock; ahead of it only with --force-now",
            ),
            argument("--force-now", action="store_true", help="let --now shorten grace, and sweep orphans whatever their age"),
            REASON_OPTION,
            argument("--all", action="store_true", help="look at every partition, also where the tier-wide log says that nothing is due"),
        ),
    ),
    Command(
        "clean",
        "clean one Kafka log directory offline, without a tier",
        "clean.run_clean",
        (
            argument(
                "log_dir", metavar="LOG_DIR", type=Path, help="holds <20 digits>.log and what belongs to them; all segments count as sealed"
            ),
            argument("out_dir", metavar="OUT_DIR", type=Path, help="must not exist; gets the rewritten segments"),
            argument(
                "--first-dirty-offset",
                type=whole_number(),
                metavar="N",
                help="first offset that is not clean yet (default: the log's start)",
            ),
            argument(
                "--first-uncleanable-offset",
                type=whole_number(),
                metavar="N",
                help="first offset to leave alone; inside a segment it moves down to its base (default: the log's end)",
            ),
            argument(
                "--high-watermark",
                type=whole_number(),
                metavar="N",
                help="a batch that ends here keeps its header (default: the log's end)",
            ),
            CLOCK_OPTION,
            argument("--delete-retention-ms", type=whole_number(), metavar="N", default=86_400_000, help="default 86400000, a day"),
            argument("--segment-bytes", type=whole_number(14, INT32_MAX), metavar="N", default=1 << 30, help="default 1073741824"),
            argument("--segment-index-bytes", type=whole_number(4, INT32_MAX), metavar="N", default=10 << 20, help="default 10485760"),
            argument("--index-interval-bytes", type=whole_number(0, INT32_MAX), metavar="N", default=4096, help="default 4096"),
            argument(
                "--map-entries",
                type=whole_number(1, 2**31),
                metavar="N",
                help="stop the map as Kafka does when it holds N keys (default: no limit)",
            ),
            argument("--threads", type=whole_number(1, 256), metavar="N", default=1, help="default 1"),
            PROFILE_OPTION,
        ),
    ),
    Command(
        "generations",
        "write compacted partitions for consumers of Pinterest's layout",
        "",
        (),
        (
            Command(
                "write",
                "bring them up to what the tier's readers read",
                "generations.write_generations_command",
                (PARTITIONS_ARGUMENT, TOPICS_OPTION),
            ),
            Command(
                "list",
                "the current generation of each partition, and those that wait for their end",
                "generations.list_generations_command",
                (TOPICS_OPTION,),
            ),
            Command(
                "retire",
                "delete those that were superseded long enough ago",
                "generations.retire_generations_command",
                (TOPICS_OPTION, DRY_RUN_OPTION),
            ),
        ),
    ),
    Command(
        "segments",
        "list remote segments, and print the records of one",
        "",
        (),
        (
            Command("list", "remote segments with state and lineage", "segments.list_segments_command", (PARTITION_ARGUMENT,)),
            Command(
                "dump",
                "batches and records of one segment",
                "segments.dump_segment_command",
                (
                    PARTITION_ARGUMENT,
                    argument("id", metavar="ID", help="as `segments list` prints it, or its first characters"),
                    argument("--whole", action="store_true", help="long keys and values are not cut, and headers are there"),
                ),
            ),
        ),
    ),
    Command(
        "bloom",
        "show or rebuild the sidecars that let a round skip segments",
        "",
        (),
        (
            Command(
                "show",
                "what the sidecars say, and what filters have done so far",
                "bloom.show_sidecars_command",
                (PARTITION_ARGUMENT, CLOCK_OPTION),
            ),
            Command(
                "rebuild",
                "read live segments and write their sidecars anew",
                "bloom.rebuild_sidecars_command",
                (PARTITION_ARGUMENT, argument("--missing", action="store_true", help="only where there is none that can be used")),
            ),
        ),
    ),
    Command(
        "verify",
        "check that the tier is what its metadata say",
        "verify.run_verify",
        (
            PARTITIONS_ARGUMENT,
            argument("--fast", action="store_true", help="a tier that brokers write: without reading segments"),
            argument("--deep", action="store_true", help="also add up what each segment holds, and compare it with what was recorded"),
        ),
    ),
    Command(
        "repair",
        "make good missing and damaged objects, from a log directory or another tier",
        "repair.run_repair",
        (
            PARTITION_ARGUMENT,
            argument(
                "--from",
                dest="sources",
                action="append",
                default=[],
                metavar="LOG_DIR|CONFIG",
                help="a Kafka log directory, one with directories of partitions in it, or the configuration of another tier (repeatable)",
            ),
            argument("--dry-run", action="store_true", help="only search, and say what would be done"),
            REASON_OPTION,
        ),
    ),
    Command(
        "doctor",
        "tell what harms a broker-managed tier, or is going to, compacted or not",
        "doctor.run_doctor",
        (
            PARTITIONS_ARGUMENT,
            argument("--fail-on", choices=("error", "warning"), default="error", help="exit with 3 if there is one (default: error)"),
            PRICES_OPTION,
        ),
    ),
    Command(
        "orphans",
        "find and delete objects of broker-managed tiers that no metadata name",
        "",
        (),
        (
            Command(
                "find",
                "list objects that no metadata names; deletes nothing",
                "orphans.find_orphans_command",
                (
                    PARTITIONS_ARGUMENT,
                    argument("--to", metavar="FILE", type=Path, help="write the list there, to be read and given to `orphans purge`"),
                ),
            ),
            Command(
                "purge",
                "delete of such a list what still is an orphan",
                "orphans.purge_orphans_command",
                (argument("file", metavar="FILE", type=Path), DRY_RUN_OPTION, REASON_OPTION),
            ),
        ),
    ),
    Command(
        "checkpoints",
        "show cleaner offsets by compactor epoch: who led, who was fenced",
        "",
        (),
        (
            Command(
                "list",
                "cleaner offsets and leaders of all partitions, or what is in a checkpoint file of Kafka's",
                "checkpoints.list_checkpoints",
                (argument("targets", nargs="*", metavar="TOPIC-PARTITION|FILE", help=f"default: all partitions of the tier; {FILE_HELP}"),),
            ),
            Command(
                "show",
                "one partition: cleaner offsets, lease, what was fenced",
                "checkpoints.show_checkpoint",
                (argument("target", metavar="TOPIC-PARTITION|FILE", help=FILE_HELP),),
            ),
            Command(
                "lineage",
                "the tree of compactor epochs: who led when, published what, was cut off where",
                "checkpoints.show_compactor_epochs",
                (PARTITION_ARGUMENT,),
            ),
            Command(
                "diff",
                "two points in time of one partition, or two checkpoint files of Kafka's",
                "checkpoints.show_checkpoint_diff",
                (
                    argument("target", metavar="TOPIC-PARTITION|FILE"),
                    argument(
                        "before", metavar="FROM", help="a slot, a time (milliseconds, ISO 8601, '2h ago'), a run id; or the second file"
                    ),
                    argument("after", metavar="TO", nargs="?", help="default: now; for a run alone: before and after it"),
                ),
            ),
            Command(
                "verify",
                "cleaner offsets against rules and segments, the control log against itself",
                "checkpoints.verify_checkpoints",
                (PARTITIONS_ARGUMENT,),
            ),
        ),
    ),
    Command(
        "runs",
        "show past rounds: who ran them, how much they did, how they ended",
        "",
        (),
        (
            Command("list", "the rounds that are remembered, oldest first", "runs.list_runs", (PARTITIONS_ARGUMENT,)),
            Command("show", "one round", "runs.show_run", (RUN_ARGUMENT,)),
        ),
    ),
    Command(
        "undo",
        "make readers use the segments again that a round replaced",
        "undo.run_undo",
        (
            RUN_ARGUMENT,
            argument("--partition", metavar="TOPIC-PARTITION", help="its partition (default: looked for among all)"),
            REASON_OPTION,
        ),
    ),
    Command(
        "explain",
        "explain why a partition is not cleaned, or what became of a key or an offset",
        "explain.run_explain",
        (
            PARTITION_ARGUMENT,
            exclusive_arguments(
                argument("--key", metavar="K", help="text, base64:... or avro:JSON; reads every segment"),
                argument("--offset", metavar="N", type=whole_number(), help="reads the segments from there on"),
            ),
            CLOCK_OPTION,
        ),
    ),
    Command(
        "erasure",
        "show whether a key is erased: what still holds it, and what remains to happen",
        "erasure.run_erasure",
        (
            argument("topic", metavar="TOPIC", help="all of its partitions; or one TOPIC-PARTITION"),
            argument("--key", metavar="K", action="append", default=[], help="text, or base64:...; may be repeated"),
            argument("--keys-file", metavar="FILE", type=Path, help="one key a line, written like --key"),
            argument("--by-filters", action="store_true", help="do not read live segments whose Bloom filter has none of the keys"),
            argument("--expedite", action="store_true", help="do what is needed now: rounds over the partitions concerned, then retire"),
            argument(
                "--shorten-grace", action="store_true", help="with --expedite: consent that replaced objects go before their grace ends"
            ),
            REASON_OPTION,
            argument("--to", metavar="REPORT", type=Path, help="write the report there, as JSON"),
        ),
    ),
    Command("daemon", "run rounds and delete replaced segments continuously; serves status pages", "daemon.run_daemon"),
    Command(
        "pause",
        "let no compactor begin a round on these partitions until resume",
        "pauses.run_pause",
        (
            argument(
                "pattern",
                metavar="PATTERN",
                nargs="?",
                help="a topic, a TOPIC-PARTITION or a whole regular expression (none: lists what is paused)",
            ),
            REASON_OPTION,
        ),
    ),
    Command(
        "resume",
        "let rounds begin again on paused partitions",
        "pauses.run_resume",
        (argument("pattern", metavar="PATTERN", help="as `pause` was given it"), REASON_OPTION),
    ),
    Command(
        "wake",
        "ask the daemons for a round on these partitions at once",
        "pauses.run_wake",
        (
            argument("partitions", nargs="+", metavar="TOPIC[-PARTITION]", help="partitions, topics or whole regular expressions"),
            REASON_OPTION,
        ),
    ),
    Command(
        "audit",
        "show what people did to the tier: who, when and why",
        "",
        (),
        (
            Command(
                "list",
                "what people did to the tier, newest first",
                "audit.list_audit",
                (
                    argument("pattern", nargs="?", metavar="PATTERN", help="a topic, a TOPIC-PARTITION or a regular expression"),
                    argument("--since", type=parse_time_ms, metavar="TIME", default=0, help="a time, or '7d ago'"),
                    argument("--limit", type=whole_number(1, 100_000), metavar="N", default=100, help="most actions shown (default: 100)"),
                ),
            ),
        ),
    ),
    Command("agent", "run beside a broker and upload sealed segments of the partitions that it leads", "agent.run_agent"),
    Command(
        "config",
        "show the settings in force, or check that they work",
        "",
        (),
        (
            Command(
                "show",
                "every setting in force, and where it comes from",
                "config.show_settings",
                (argument("--topic", metavar="T", help="how this topic is cleaned; its own settings count where brokers have it"),),
            ),
            Command("check", "whether the settings work: tries the tier and the directory for local state", "config.check_settings"),
        ),
    ),
    Command(
        "completion",
        "print a script that completes commands and options in a shell",
        "completion.print_completion",
        (
            argument(
                "shell",
                choices=("bash", "zsh", "tcsh"),
                help="for bash: `tiered-compactor completion bash > /etc/bash_completion.d/tiered-compactor`",
            ),
        ),
    ),
)
"""All commands, in the order of `--help`."""
