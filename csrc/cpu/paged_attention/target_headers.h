// All that the kernels include of the standard library and of common/, to be included before a translation
// unit chooses its instruction set: an inline function that was compiled for that could else serve others.
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "common/dispatch.h"
#include "common/masks.h"
#include "common/online_softmax.h"
#include "common/paging.h"
#include "cpu/paged_attention/task.h"
