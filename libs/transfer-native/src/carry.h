/* The initiator. */
#ifndef HALFMOON_CARRY_H
#define HALFMOON_CARRY_H

#include "wire.h"

/* Once, when the module is imported: -1 with a Python error set. */
int carry_init(void);
/* Move a batch; see the stub for what goes in and out. */
PyObject *carry(PyObject *module, PyObject *args);

#endif
