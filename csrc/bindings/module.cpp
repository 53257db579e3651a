// Makes the library importable: `import pagedkv._C` runs the registrations of the other files of this folder.
#include <Python.h>

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
