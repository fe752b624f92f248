"""The documents, executed as they are written, in rooms of their own.

A page is read from top to bottom, in one shell, so variables go on from block to block. ```bash blocks must succeed,
```python and ```javascript blocks run as programs, warnings are errors in Python, ```json blocks are JSON, ```text is
what no one types. Of a ```console block each line after `$ ` is typed (one that ends in a backslash, or whose next
begins with `> `, goes on), and what follows must be what it prints; there `...` stands for anything; ids, times, spans
of time, ports and process ids may differ, but an id that appears twice is the same both times, and a command that names
an id of the page is given the real one.

A comment in front of a block says what a reader does without being told, or why nothing is done:

    <!-- in another terminal -->        it is left running; a page without one has `gpulease serve --simulate 4`
    <!-- saved as train.py -->          the block is the content of a file
    <!-- first: COMMANDS -->            run before it
    <!-- after everything was given back -->     jobs cancelled, leases released, GPUs free
    <!-- let job-0123456789abcdef: COMMAND -->   what it prints is what the page calls so
    <!-- exits 1: WHY -->               its exit code is that
    <!-- not run: REASON -->            and a test counts these

Why not a library: byexample wants its captures and options (`<id>`, `# byexample: +paste`) written where readers see
them, and so could not take what curl really printed; mktestdocs and pytest-markdown-docs compare no output; Sybil has
no shell, prysk no Markdown. None gives each page a network, a host name and a daemon of its own, which is the greater
part of what is here.
"""
