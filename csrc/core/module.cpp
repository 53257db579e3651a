// Python module pagedkv._core: the block structures, without torch. Arrays cross as numpy.
#include <cstring>

#include "core/bindings.h"
#include "core/block_allocator.h"

namespace py = pybind11;

namespace pagedkv {

namespace {

[[noreturn]] void throw_not_integers(const std::string& name, const std::string& got) {
  throw py::type_error(name + " must be integers, got " + got);
}

[[noreturn]] void throw_too_large(const std::string& name, Py_ssize_t index) {
  throw py::value_error(name + "[" + std::to_string(index) + "] does not fit into 64 bits");
}

template <typename T>
std::vector<int64_t> copy_ints(const py::array& array) {
  std::vector<int64_t> values(array.size());
  const char* item = static_cast<const char*>(array.data());
  const py::ssize_t stride = array.strides(0);
  if (stride == sizeof(T)) {  // a stride that the compiler knows is a loop that it vectorises
    for (size_t i = 0; i < values.size(); ++i) {
      T typed;
      std::memcpy(&typed, item + i * sizeof(T), sizeof(T));
      values[i] = typed;
    }
    return values;
  }
  for (int64_t& value : values) {
    T typed;
    std::memcpy(&typed, item, sizeof(T));
    value = typed;
    item += stride;
  }
  return values;
}

std::vector<int64_t> ints_from_array(const py::array& array, const std::string& name) {
  if (array.ndim() != 1) {
    throw py::value_error(name + " must be one-dimensional, got " + std::to_string(array.ndim()) +
                          " dimensions");
  }
  if (array.size() == 0) return {};  // of any dtype: np.array([]) is float64
  const char kind = array.dtype().kind();
  if (kind != 'i' && kind != 'u') {
    throw_not_integers(name, "an array of " + std::string(py::str(static_cast<py::object>(array.dtype()))));
  }
  // The usual kinds, without a copy by numpy in between.
  if (array.dtype().is(py::dtype::of<int32_t>())) return copy_ints<int32_t>(array);
  if (array.dtype().is(py::dtype::of<int64_t>())) return copy_ints<int64_t>(array);
  const auto ints = py::array_t<int64_t, py::array::c_style | py::array::forcecast>::ensure(array);
  if (!ints) throw py::error_already_set();
  std::vector<int64_t> values(ints.data(), ints.data() + ints.size());
  if (kind == 'u' && array.itemsize() == 8) {
    for (const int64_t value : values) {
      if (value < 0) throw py::value_error(name + " holds a value above 2**63 - 1");
    }
  }
  return values;
}

}  // namespace

std::vector<int64_t> to_ints(const py::object& object, const std::string& name) {
  if (py::isinstance<py::array>(object))
    return ints_from_array(py::reinterpret_borrow<py::array>(object), name);
  // A copy: what an element's __index__ does to a list does no harm.
  const auto items = py::reinterpret_steal<py::object>(PySequence_Tuple(object.ptr()));
  if (!items) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    throw_not_integers(name, Py_TYPE(object.ptr())->tp_name);
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(items.ptr());
  std::vector<int64_t> values(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyTuple_GET_ITEM(items.ptr(), i);
    int overflow = 0;
    if (PyLong_CheckExact(item)) {
      values[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
      if (overflow != 0) throw_too_large(name, i);
      continue;
    }
    const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(item));
    if (!integer) {
      if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
      PyErr_Clear();
      throw_not_integers(name + "[" + std::to_string(i) + "]", Py_TYPE(item)->tp_name);
    }
    values[i] = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
    if (overflow != 0) throw_too_large(name, i);
  }
  return values;
}

py::array_t<int64_t> to_mapping(const std::vector<CopyPair>& pairs) {
  py::array_t<int64_t> mapping({static_cast<py::ssize_t>(pairs.size()), py::ssize_t{2}});
  int64_t* entry = mapping.mutable_data();
  for (const auto& [source, destination] : pairs) {
    *entry++ = source;
    *entry++ = destination;
  }
  return mapping;
}

PYBIND11_MODULE(_core, module) {
  module.doc() = "Block structures of pagedkv: allocator, tables, sequences. Needs neither torch nor a GPU.";
  auto out_of_memory =
      py::register_local_exception<OutOfMemory>(module, "OutOfMemoryError", PyExc_MemoryError);
  out_of_memory.attr("__module__") = "pagedkv";
  out_of_memory.doc() = "Too few cache blocks are free. The call that raised it changed nothing.";
  bind_block_allocator(module);
  bind_block_table(module);
  bind_batches(module);
  bind_sequences(module);
  bind_prefix_cache(module);
}

}  // namespace pagedkv
