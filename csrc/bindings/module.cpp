// Makes the library importable: `import pagedkv._C` runs the registrations of the other files of this folder.
#include <Python.h>

#include <exception>

#include "cpu/paged_attention/isa.h"

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  try {
    PyModule_AddStringConstant(module, "CPU_ISA", pagedkv::cpu::isa_name(pagedkv::cpu::chosen_isa()));
    PyModule_AddStringConstant(module, "CPU_ISAS", pagedkv::cpu::supported_isas().c_str());
  } catch (const std::exception& error) {
    Py_DECREF(module);
    PyErr_SetString(PyExc_ImportError, error.what());
    return nullptr;
  }
  return module;
}
