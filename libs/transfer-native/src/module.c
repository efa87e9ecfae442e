/* The module: the owner's table and the initiator's calls. */
#include "carry.h"
#include "copy.h"
#include "records.h"
#include "table.h"

static PyMethodDef methods[] = {
    {"carry", carry, METH_VARARGS, "Move a batch over a connection, as far as all goes well."},
    {"copy", copy, METH_VARARGS, "Copy a batch between local memory and a mapped region."},
    {"differing", differing, METH_VARARGS, "Find the slices of a batch that are other bytes in a mapped region."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "halfmoon_transfer_native._native",
    .m_doc = "The loops of the TCP and shared-memory backends, without the interpreter.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    records_init();
    if (carry_init() < 0 || copy_init() < 0 || PyType_Ready(&Table_Type) < 0 || PyType_Ready(&Records_Type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddObjectRef(module, "Table", (PyObject *)&Table_Type) < 0 ||
        PyModule_AddObjectRef(module, "Records", (PyObject *)&Records_Type) < 0 ||
        PyModule_AddStringConstant(module, "RECORDS_MISSING", records_missing()) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
