"""The command line: what people type, and how results are printed. The rules of the work itself live below.

How a command is made (``commands/config.py`` is the example):

1. A line in ``main.COMMANDS``: name, one line of help, module. Nothing of the module is imported before it is chosen.
2. The module, ``compactor/cli/commands/<name>.py``, has one public function, called with the command's parser::

       def add_arguments(parser: Parser) -> None:
           parser.add_argument("log_dir", type=Path, help="...")
           parser.runs(clean)                      # or, with subcommands:
           parser.subcommand("show", "one line of help").runs(show)

   ``runs`` adds ``--config`` and ``--output``. Only light imports at the top of the module (errors, model.ids, frame, output, the
   standard library); numpy, boto3, pydantic and all that bring them are imported inside the function: ``--help`` answers at once.
   A test imports every command's help and looks for heavy modules.
3. The function, ``def clean(args: Namespace, out: Output) -> int | None``: reads the settings with ``frame.settings(args)``, calls
   *one* thing below that does the work, and hands the result to ``out.result(document, *tables)``: the document is the JSON contract,
   the tables are for people. Long work is shown with ``out.progress``; remarks go to ``out.note``. It returns an exit code, or
   None for 0; a command over several partitions returns ``errors.gravest([...])``.
4. Errors are raised (``compactor.errors``) and never printed by the command: ``main.entry`` prints one line and exits with their code.
5. A page ``docs/commands/<name>.md``.
"""
