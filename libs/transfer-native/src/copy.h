/* Copies in memory. */
#ifndef HALFMOON_COPY_H
#define HALFMOON_COPY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Once, when the module is imported: -1 with a Python error set. */
int copy_init(void);
/* Copy a batch; see the stub for what goes in and out. */
PyObject *copy(PyObject *module, PyObject *args);
/* Compare a batch that was copied; see the stub. */
PyObject *differing(PyObject *module, PyObject *args);

#endif
