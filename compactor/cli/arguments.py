"""The table of all commands. It imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path

from compactor.cli.command_parser import (
    ACCEPT_ERASED_OPTION,
    CLOCK_OPTION,
    DRY_RUN_OPTION,
    FIELD_FORMATS,
    FILE_HELP,
    INT32_MAX,
    PARTITION_ARGUMENT,
    PARTITION_OR_TOPIC_ARGUMENT,
    PARTITIONS_ARGUMENT,
    PATTERN_ARGUMENT,
    PRICES_OPTION,
    PROFILE_OPTION,
    REASON_OPTION,
    RUN_ARGUMENT,
    SAMPLED_PARTITIONS,
    SKIP_DAMAGED_OPTION,
    TOPIC_ID_ARGUMENT,
    TOPICS_OPTION,
    WATCH_SECONDS,
    Command,
    argument,
    exclusive_arguments,
    parse_byte_count,
    parse_offset_or_time,
    parse_time_ms,
    parse_topic_id,
    whole_number_parser,
)
from compactor.constants import MAX_OFFSET

COMMANDS = (
    Command(
        "demo",
        "compact a generated topic, from import to export",
        "demo.run_demo",
        (
            argument("--dir", metavar="D", type=Path, help="directory for all data, which stays (default: a temporary directory)"),
            argument("--tier", metavar="URL", help="create the tier there, in a bucket with the [s3] settings; it stays"),
        ),
    ),
    Command(
        "import",
        "import sealed segments of a Kafka log directory into the tier",
        "import_.import_command",
        (
            argument(
                "log_dir",
                metavar="LOG_DIR|LOG_ROOT",
                nargs="?",
                type=Path,
                help="the directory of a partition (<20 digits>.log and their indexes), or a directory of <topic>-<partition> directories",
            ),
            argument(
                "--from-tier",
                metavar="CONFIG",
                help="instead of a directory: the configuration of another tier, whose partitions are imported",
            ),
            argument("--topic", metavar="T", help="default: from the directory's name"),
            argument("--partition", type=whole_number_parser(0, INT32_MAX), metavar="P", help="default: from the directory's name"),
            argument("--topics", metavar="REGEX", help="import only topics whose whole name matches, of a LOG_ROOT or another tier"),
            argument("--live", action="store_true", help="a broker is writing there: leave out the newest segment"),
            argument("--allow-gaps", action="store_true", help="accept missing offsets, for example where a cleaner has removed segments"),
            argument(
                "--accept-truncation",
                action="store_true",
                help="discard in the tier what the broker has discarded after an unclean election",
            ),
            argument(
                "--accept-loss",
                action="store_true",
                help="with --accept-truncation: also if a round beyond the cut cannot be undone, so that some keys lose their last value; "
                "and continue the tier from a log that was cleaned beyond its end, so that deleted keys may stay",
            ),
            argument(
                "--new-incarnation",
                action="store_true",
                help="the topics were deleted and created again: import logs of another topic id as new incarnations",
            ),
            ACCEPT_ERASED_OPTION,
            REASON_OPTION,
        ),
    ),
    Command(
        "export",
        "write the current view of a partition as a Kafka log directory",
        "export.export_command",
        (
            PARTITION_ARGUMENT,
            TOPIC_ID_ARGUMENT,
            argument(
                "--leader-epoch-zero",
                action="store_true",
                help="for a cluster that has not written the log: leader epoch 0, no producers, no open transaction",
            ),
            argument("--new-topic-id", metavar="ID", help="with --leader-epoch-zero: the topic's id in that cluster"),
            SKIP_DAMAGED_OPTION,
            argument("folder", metavar="DIR", type=Path, help="must not exist"),
        ),
    ),
    Command(
        "topics",
        "list the partitions that the tier holds",
        "topics.list_command",
        (),
        (
            Command("delete", "remove a partition from the tier", "topics.delete_command", (PARTITION_ARGUMENT, REASON_OPTION)),
            Command(
                "delete-records",
                "delete the records of a partition below an offset or a time",
                "topics.delete_records_command",
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
                "topics.adopt_command",
                (
                    PATTERN_ARGUMENT,
                    exclusive_arguments(
                        argument(
                            "--topic-id", type=parse_topic_id, metavar="ID", help="the topic's id, as kafka-topics --describe prints it"
                        ),
                        argument(
                            "--seam",
                            type=whole_number_parser(),
                            metavar="OFFSET",
                            help="the tier's end + 1, where the next import continues the log",
                        ),
                        required=True,
                    ),
                    REASON_OPTION,
                ),
            ),
            Command(
                "takeover",
                "compact a topic of a broker-managed tier with this control store, instead of one that was lost or moved",
                "topics.take_over_topics",
                (PATTERN_ARGUMENT, REASON_OPTION),
            ),
            Command("snapshot", "store the metadata of a broker-managed tier, for readers without a broker", "topics.save_broker_metadata"),
        ),
    ),
    Command(
        "cat",
        "print the records of a partition, one per line",
        "cat.print_records",
        (
            PARTITION_ARGUMENT,
            TOPIC_ID_ARGUMENT,
            argument("--from", metavar="N", dest="first", type=whole_number_parser(), default=0, help="first offset"),
            argument("--to", metavar="N", dest="last", type=whole_number_parser(), default=MAX_OFFSET, help="last offset, inclusive"),
            argument("--key", metavar="K", help="only records with this key: text, base64:... or avro:JSON"),
            argument("--isolation", choices=("read_committed", "read_uncommitted"), default="read_committed"),
            argument("--view", choices=("all", "latest"), default="all", help="latest: the last value of each key, without deleted keys"),
            SKIP_DAMAGED_OPTION,
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
        "show the state of the tier, and which partitions need help",
        "status.show_tier_status",
        (argument("--watch", action="store_true", help=f"show it again every {WATCH_SECONDS} s, until Ctrl-C"),),
    ),
    Command(
        "plan",
        "show what a round would do, and what it would cost",
        "plan.plan_command",
        (
            PARTITIONS_ARGUMENT,
            CLOCK_OPTION,
            argument("--force", action="store_true", help="as `run --force` would"),
            argument(
                "--sample",
                type=parse_byte_count,
                metavar="BYTES",
                help="bytes to read of each partition to estimate the least saving; 0 for none (default: 8 MiB of the largest "
                f"{SAMPLED_PARTITIONS} due partitions without a known round)",
            ),
            PRICES_OPTION,
        ),
    ),
    Command(
        "run",
        "run one round on each partition that is due",
        "run.run_compaction_rounds",
        (
            PARTITIONS_ARGUMENT,
            CLOCK_OPTION,
            argument("--force", action="store_true", help="clean whatever is dirty, whatever the dirty ratio is"),
            PROFILE_OPTION,
        ),
    ),
    Command(
        "recompact",
        "compact whole partitions from the log's start, as a Spark job",
        "recompact.recompact_command",
        (
            PARTITIONS_ARGUMENT,
            CLOCK_OPTION,
            argument(
                "--min-benefit",
                type=whole_number_parser(),
                metavar="BYTES",
                default=1,
                help="skip partitions whose round would gain less (default: 1, which skips those that gain nothing)",
            ),
            argument("--force", action="store_true", help="skip no partition, not even clean ones"),
            argument("--dry-run", action="store_true", help="show what would be done, without Spark, and change nothing"),
            argument("--class-archive", action="store_true", help="only make the archive with which Spark starts faster on this machine"),
        ),
    ),
    Command(
        "retire",
        "delete replaced segments whose grace is over, and sweep orphans",
        "retire.retire_command",
        (
            DRY_RUN_OPTION,
            argument(
                "--now",
                "--at",
                type=parse_time_ms,
                metavar="TIME",
                help="replaces the store's clock; a later time counts only with --force-now",
            ),
            argument("--force-now", action="store_true", help="let --now shorten grace periods, and sweep orphans whatever their age"),
            REASON_OPTION,
            argument("--all", action="store_true", help="inspect every partition, even if the catalog says that nothing is due"),
        ),
    ),
    Command(
        "clean",
        "clean one Kafka log directory offline, without a tier",
        "clean.run_offline_cleaning",
        (
            argument(
                "log_dir", metavar="LOG_DIR", type=Path, help="contains <20 digits>.log and their indexes; all segments count as sealed"
            ),
            argument("out_dir", metavar="OUT_DIR", type=Path, help="must not exist; receives the rewritten segments"),
            argument(
                "--first-dirty-offset",
                type=whole_number_parser(),
                metavar="N",
                help="first offset that is not clean yet (default: the log's start)",
            ),
            argument(
                "--first-uncleanable-offset",
                type=whole_number_parser(),
                metavar="N",
                help="first offset that must not be cleaned; inside a segment it moves down to its base (default: the log's end)",
            ),
            argument(
                "--high-watermark",
                type=whole_number_parser(),
                metavar="N",
                help="a batch that ends here keeps its header (default: the log's end)",
            ),
            CLOCK_OPTION,
            argument("--delete-retention-ms", type=whole_number_parser(), metavar="N", default=86_400_000, help="default 86400000, a day"),
            argument("--segment-bytes", type=whole_number_parser(14, INT32_MAX), metavar="N", default=1 << 30, help="default 1073741824"),
            argument(
                "--segment-index-bytes", type=whole_number_parser(4, INT32_MAX), metavar="N", default=10 << 20, help="default 10485760"
            ),
            argument("--index-interval-bytes", type=whole_number_parser(0, INT32_MAX), metavar="N", default=4096, help="default 4096"),
            argument(
                "--map-entries",
                type=whole_number_parser(1, 2**31),
                metavar="N",
                help="stop the map as Kafka does when it holds N keys (default: no limit)",
            ),
            argument("--threads", type=whole_number_parser(1, 256), metavar="N", default=1, help="default 1"),
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
                "bring generations up to the published view",
                "generations.write_generations_command",
                (PARTITIONS_ARGUMENT, TOPICS_OPTION),
            ),
            Command(
                "list",
                "list the current generation of each partition, and superseded ones",
                "generations.list_generations_command",
                (TOPICS_OPTION,),
            ),
            Command("retire", "delete superseded generations", "generations.delete_pinterest_generations", (TOPICS_OPTION, DRY_RUN_OPTION)),
        ),
    ),
    Command(
        "outputs",
        "write compacted views for other readers, and show how far they are",
        "",
        (),
        (
            Command("write", "bring outputs up to the published view", "outputs.write_outputs", (PARTITIONS_ARGUMENT,)),
            Command(
                "list", "list Iceberg tables with their lag, files and snapshots", "outputs.list_iceberg_tables", (PARTITIONS_ARGUMENT,)
            ),
        ),
    ),
    Command(
        "segments",
        "list remote segments, and print the records of one of them",
        "",
        (),
        (
            Command(
                "list", "list remote segments with state and lineage", "segments.list_segments_command", (PARTITION_OR_TOPIC_ARGUMENT,)
            ),
            Command(
                "dump",
                "print the batches and records of one segment",
                "segments.dump_segment_command",
                (
                    PARTITION_ARGUMENT,
                    argument("id", metavar="ID", help="as `segments list` prints it, or its first characters"),
                    argument("--whole", action="store_true", help="print long keys and values in full, and headers"),
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
                "show the sidecars, and what filters have saved so far",
                "bloom.show_command",
                (PARTITION_ARGUMENT, CLOCK_OPTION),
            ),
            Command(
                "rebuild",
                "read live segments and rewrite their sidecars",
                "bloom.rebuild_command",
                (PARTITION_ARGUMENT, argument("--missing", action="store_true", help="only segments without a usable sidecar")),
            ),
        ),
    ),
    Command(
        "verify",
        "check that the tier matches its metadata",
        "verify.verify_tier_command",
        (
            PARTITIONS_ARGUMENT,
            argument("--fast", action="store_true", help="for broker-managed tiers: do not read segments"),
            argument("--deep", action="store_true", help="also sum up the batches of each segment, and compare with the recorded sum"),
        ),
    ),
    Command(
        "repair",
        "make good missing and damaged objects, from a log directory or another tier",
        "repair.repair_partition_command",
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
        "find what harms a broker-managed tier, or is going to, compacted or not",
        "doctor.doctor_command",
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
                "list objects that no metadata names, and delete nothing",
                "orphans.find_command",
                (PARTITIONS_ARGUMENT, argument("--to", metavar="FILE", type=Path, help="write the list there, for `orphans purge`")),
            ),
            Command(
                "purge",
                "delete the listed objects that are still orphans",
                "orphans.purge_command",
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
                "list cleaner offsets and leaders of all partitions, or the content of a checkpoint file of Kafka's",
                "checkpoints.list_partition_checkpoints",
                (argument("targets", nargs="*", metavar="TOPIC-PARTITION|FILE", help=f"default: all partitions of the tier; {FILE_HELP}"),),
            ),
            Command(
                "show",
                "show one partition: cleaner offsets, lease, fenced records",
                "checkpoints.show_partition_checkpoint",
                (argument("target", metavar="TOPIC-PARTITION|FILE", help=FILE_HELP),),
            ),
            Command(
                "lineage",
                "show the tree of compactor epochs: who led when, published what, was fenced where",
                "checkpoints.show_compactor_epochs",
                (PARTITION_ARGUMENT,),
            ),
            Command(
                "diff",
                "compare two points in time of one partition, or two checkpoint files of Kafka's",
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
                "check cleaner offsets against rules and segments, and the control log for gaps",
                "checkpoints.verify_command",
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
            Command("list", "list the remembered rounds, oldest first", "runs.list_compaction_runs", (PARTITIONS_ARGUMENT,)),
            Command("show", "show one round", "runs.show_compaction_run", (RUN_ARGUMENT,)),
        ),
    ),
    Command(
        "undo",
        "undo a round: readers get the segments back that it replaced",
        "undo.undo_command",
        (
            RUN_ARGUMENT,
            argument("--partition", metavar="TOPIC-PARTITION", help="its partition (default: found by the run's id)"),
            ACCEPT_ERASED_OPTION,
            REASON_OPTION,
        ),
    ),
    Command(
        "explain",
        "explain why a partition is not cleaned, or what happened to a key or an offset",
        "explain.print_partition_explanation",
        (
            PARTITION_OR_TOPIC_ARGUMENT,
            exclusive_arguments(
                argument("--key", metavar="K", help="text, base64:... or avro:JSON; reads every segment"),
                argument("--offset", metavar="N", type=whole_number_parser(), help="an offset; reads the segments from there on"),
            ),
            CLOCK_OPTION,
        ),
    ),
    Command(
        "erasure",
        "show whether a key is erased, what still holds it, and what has to happen",
        "erasure.erasure_command",
        (
            argument("topic", metavar="TOPIC", help="a topic, with all its partitions, or one TOPIC-PARTITION"),
            argument("--key", metavar="K", action="append", default=[], help="text, or base64:...; may be repeated"),
            argument("--keys-file", metavar="FILE", type=Path, help="a file with one key per line, written as for --key"),
            argument("--by-filters", action="store_true", help="do not read live segments whose Bloom filter has none of the keys"),
            argument("--expedite", action="store_true", help="run rounds on the partitions concerned now, and then retire"),
            argument(
                "--shorten-grace",
                action="store_true",
                help="with --expedite: allow that replaced objects are deleted before their grace ends",
            ),
            REASON_OPTION,
            argument("--to", metavar="REPORT", type=Path, help="write the report to this file, as JSON"),
        ),
    ),
    Command("daemon", "run rounds and delete replaced segments continuously; serves status pages", "daemon.run_daemon"),
    Command(
        "pause",
        "prevent new rounds on these partitions until resume",
        "pauses.pause_command",
        (
            argument(
                "pattern",
                metavar="PATTERN",
                nargs="?",
                help="a topic, a TOPIC-PARTITION or a whole regular expression (default: list what is paused)",
            ),
            REASON_OPTION,
        ),
    ),
    Command(
        "resume",
        "allow rounds on paused partitions again",
        "pauses.resume_command",
        (argument("pattern", metavar="PATTERN", help="the pattern that was paused"), REASON_OPTION),
    ),
    Command(
        "wake",
        "ask the daemons for a round on these partitions at once",
        "pauses.wake_command",
        (
            argument("partitions", nargs="+", metavar="TOPIC[-PARTITION]", help="partitions, topics or whole regular expressions"),
            REASON_OPTION,
        ),
    ),
    Command(
        "audit",
        "show manual actions on the tier: who, when and why",
        "",
        (),
        (
            Command(
                "list",
                "list manual actions, newest first",
                "audit.list_audited_actions",
                (
                    argument("pattern", nargs="?", metavar="PATTERN", help="a topic, a TOPIC-PARTITION or a regular expression"),
                    argument("--since", type=parse_time_ms, metavar="TIME", default=0, help="a time, or '7d ago'"),
                    argument(
                        "--limit",
                        type=whole_number_parser(1, 100_000),
                        metavar="N",
                        default=100,
                        help="show at most so many actions (default: 100)",
                    ),
                ),
            ),
        ),
    ),
    Command("agent", "run beside a broker and upload sealed segments of the partitions that it leads", "agent.run_upload_agent"),
    Command(
        "serve",
        "let any Kafka client read the tier, until stopped",
        "serve.serve_tier",
        (argument("--listen", metavar="HOST:PORT", help="where clients connect (default: [serve] listen)"),),
    ),
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
            Command("check", "whether the settings work: tries the tier and the directory for local state", "config_check.check_settings"),
        ),
    ),
    Command(
        "completion",
        "print a script that completes commands and options in a shell",
        "completion.completion_command",
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
