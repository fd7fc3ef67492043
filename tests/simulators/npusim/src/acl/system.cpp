// Start, end, and what the program may ask about the installation.

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "../core/config.h"
#include "../core/start.h"
#include "api.h"

using namespace npusim;

namespace {

std::atomic<bool> initialised{false};
std::mutex options_lock;
std::map<int, int64_t> options;

}  // namespace

NPUSIM_API int aclInit(const char*) {
  if (initialised.exchange(true)) return kRepeatInitialize;
  return guarded("aclInit", start);
}

NPUSIM_API int aclFinalize() { return initialised.exchange(false) ? kOk : kUninitialized; }

NPUSIM_API const char* aclrtGetSocName() { return "Ascend910B3"; }

NPUSIM_API const char* aclGetRecentErrMsg() { return recent_error(); }

NPUSIM_API int aclrtGetLastError(int) { return kOk; }

NPUSIM_API int aclrtPeekAtLastError(int) { return kOk; }

// The installed version, for packages by name; torch_npu compares it as text.
NPUSIM_API int aclsysGetVersionStr(char*, char* version) {
  if (version == nullptr) return kInvalidParam;
  strcpy(version, "8.5.0");
  return kOk;
}

NPUSIM_API int aclrtGetSysParamOpt(int option, int64_t* value) {
  std::lock_guard<std::mutex> hold(options_lock);
  *value = options[option];
  return kOk;
}

NPUSIM_API int aclrtSetSysParamOpt(int option, int64_t value) {
  std::lock_guard<std::mutex> hold(options_lock);
  options[option] = value;
  return kOk;
}

NPUSIM_API int aclrtCtxSetSysParamOpt(int option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

NPUSIM_API int aclrtCtxGetSysParamOpt(int option, int64_t* value) {
  return aclrtGetSysParamOpt(option, value);
}

// Time-outs of operators on the device. Nothing here takes that long.
NPUSIM_API int aclrtSetOpWaitTimeout(uint32_t) { return kOk; }

NPUSIM_API int aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }

NPUSIM_API int aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  if (actual != nullptr) *actual = timeout;
  return kOk;
}

NPUSIM_API int aclrtSetExceptionInfoCallback(void*) { return kOk; }

// torch_npu's log goes here; shown when traced.
NPUSIM_API void aclAppLog(int level, const char* function, const char* file, uint32_t line,
                          const char* format, ...) {
  if (!tracing()) return;
  char message[800];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  trace(text("log %d %s %s:%u %s", level, function, file, line, message));
}

// How floats overflow. One behaviour here.
NPUSIM_API int aclrtSetDeviceSatMode(int) { return kOk; }

NPUSIM_API int aclrtGetDeviceSatMode(int* mode) {
  *mode = 1;
  return kOk;
}

NPUSIM_API int aclrtSetStreamOverflowSwitch(void*, uint32_t) { return kOk; }

NPUSIM_API int aclrtGetStreamOverflowSwitch(void*, uint32_t* on) {
  *on = 0;
  return kOk;
}

// Options of a compiler of operators that does not exist here.
NPUSIM_API int aclSetCompileopt(int, const char*) { return kOk; }

NPUSIM_API size_t aclGetCompileoptSize(int) { return 64; }

NPUSIM_API int aclGetCompileopt(int, char* value, size_t room) {
  if (room > 0) value[0] = '\0';
  return kOk;
}
