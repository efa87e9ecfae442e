"""Test a service of any language as a black box against docs/protocol.md.

    catalogue   all checks: data in `cases`, code in `checks`
    subject     the tested process, the kit's metadata server, and the cluster key
    peers       ends of the wire that the kit plays: callers, listeners, transfer connections
    data_cases  the interpreter of `cases/*.yaml`
    run         runs checks of a role against a subject
    report      lines, JSON, JUnit and known failures

Messages are plain maps here, and frames plain bytes: the kit decodes what a subject sends by the
protocol's codec only to see that it is a message.
"""
