/*
 * Stands in for libnvidia-ml.so.1: GPUs that do what a script says.
 *
 * Built by tests/fakes/nvml.py. The script is the file that NVML_STUB names; it is read anew at each
 * call, so that GPUs can fail while they are being sampled. One fact a line:
 *
 *   gpus N                   how many there are; 1 when it says nothing
 *   mig GPU N                GPU is cut into N instances
 *   gpm GPU                  GPU has performance monitors, as Hopper and later have
 *   set NAME GPU NUMBER      what it tells of NAME, such as "power" (see value_of)
 *   fail FUNCTION GPU CODE   FUNCTION returns CODE for GPU; "*" for any GPU
 *   metric NUMBER CODE       that GPM metric returns CODE
 *   hang FUNCTION GPU        FUNCTION does not return as long as the script says so
 *   xid GPU NUMBER           an event; each line is told once
 *   lost GPU                 fell off the bus: every call about it returns NVML_ERROR_GPU_IS_LOST
 *
 * Signatures, structures and numbers: NVML API reference (nvml.h) of drivers 535 to 580.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { MOST_GPUS = 16, MOST_MIG = 7, ANY = -1, SYSTEM = -2 };

typedef struct { int gpu, instance; } Device; /* instance: -1 for the whole GPU */
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef union { double d; unsigned int ui; unsigned long ul; unsigned long long ull; long long sll; } Value;
typedef struct {
    unsigned int field, scope;
    long long timestamp, latency;
    unsigned int type, result;
    Value value;
} FieldValue;
typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} EventData;
typedef struct { int gpu, instance; unsigned long long taken; } Sample;
typedef struct {
    unsigned int id, result;
    double value;
    struct { char *short_name, *long_name, *unit; } info;
} Metric;
typedef struct { unsigned int version, count; Sample *first, *second; Metric metrics[]; } MetricsGet;
typedef struct { unsigned int version, supported; } Support;

static Device devices[MOST_GPUS][MOST_MIG + 1];
static unsigned long long samples_taken;
static int xids_told, registered[MOST_GPUS];

/* The number on the script's line "WORD NAME GPU ..." (or "WORD GPU ..." without a name). */
static int told(const char *word, const char *name, int gpu, double *number)
{
    const char *path = getenv("NVML_STUB");
    FILE *script = path ? fopen(path, "r") : NULL;
    char line[256], first[64], second[64], third[64];
    int found = 0;
    double value;
    while (script && fgets(line, sizeof line, script)) {
        first[0] = second[0] = third[0] = '\0';
        value = 0;
        if (name) {
            if (sscanf(line, "%63s %63s %63s %lf", first, second, third, &value) < 3) continue;
            if (strcmp(first, word) || strcmp(second, name)) continue;
        } else {
            if (sscanf(line, "%63s %63s %lf", first, third, &value) < 2 || strcmp(first, word)) continue;
        }
        if (strcmp(third, "*") && atoi(third) != gpu) continue;
        if (number) *number = value;
        found = 1;
    }
    if (script) fclose(script);
    return found;
}

/* What every call begins with: its scripted failure, or SUCCESS. */
static int enter(const char *function, int gpu)
{
    double code;
    while (told("hang", function, gpu, NULL)) usleep(20000);
    if (gpu >= 0 && told("lost", NULL, gpu, NULL)) return GPU_IS_LOST;
    return told("fail", function, gpu, &code) ? (int)code : SUCCESS;
}

static double value_of(const char *name, int gpu, double otherwise)
{
    double value;
    return told("set", name, gpu, &value) ? value : otherwise;
}

static int count_of(const char *word, int gpu, int otherwise)
{
    double value;
    return told(word, NULL, gpu, &value) ? (int)value : otherwise;
}

static int gpus(void)
{
    const char *path = getenv("NVML_STUB");
    FILE *script = path ? fopen(path, "r") : NULL;
    char line[256];
    int count = 1, number;
    while (script && fgets(line, sizeof line, script))
        if (sscanf(line, "gpus %d", &number) == 1) count = number;
    if (script) fclose(script);
    return count < MOST_GPUS ? count : MOST_GPUS;
}

#define ENTER(gpu) do { int code = enter(__func__, gpu); if (code) return code; } while (0)
#define WHOLE(device) do { if ((device)->instance >= 0) return NOT_SUPPORTED; } while (0)

int nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    ENTER(SYSTEM);
    xids_told = 0;
    memset(registered, 0, sizeof registered);
    for (int gpu = 0; gpu < MOST_GPUS; gpu++)
        for (int place = 0; place <= MOST_MIG; place++) devices[gpu][place] = (Device){gpu, place - 1};
    return SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { return code ? "a scripted failure" : "success"; }

int nvmlSystemGetDriverVersion(char *text, unsigned int length)
{
    ENTER(SYSTEM);
    snprintf(text, length, "580.00");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) { ENTER(SYSTEM); *count = gpus(); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device)
{
    ENTER((int)index);
    if ((int)index >= gpus()) return INVALID_ARGUMENT;
    *device = &devices[index][0];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned int length)
{
    ENTER(device->gpu);
    if (device->instance >= 0) snprintf(text, length, "MIG-%d-%d", device->gpu, device->instance);
    else snprintf(text, length, "GPU-%d", device->gpu);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned int length)
{
    ENTER(device->gpu);
    snprintf(text, length, "Stand-in %d", device->gpu);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending)
{
    ENTER(device->gpu);
    *current = *pending = count_of("mig", device->gpu, 0) > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned int *count)
{
    ENTER(device->gpu);
    *count = MOST_MIG;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned int index, Device **instance)
{
    ENTER(device->gpu);
    if ((int)index >= count_of("mig", device->gpu, 0)) return NOT_FOUND;
    *instance = &devices[device->gpu][index + 1];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned int *id)
{
    ENTER(device->gpu);
    if (device->instance < 0) return INVALID_ARGUMENT;
    *id = device->instance + 1; /* as on a real GPU it is not the index */
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates)
{
    ENTER(device->gpu);
    WHOLE(device);
    if (count_of("mig", device->gpu, 0)) return NOT_SUPPORTED;
    rates->gpu = value_of("utilization", device->gpu, 90 + device->gpu);
    rates->memory = 40;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory)
{
    ENTER(device->gpu);
    memory->total = 80ULL << 30;
    if (device->instance >= 0) memory->total /= MOST_MIG + 1;
    memory->used = value_of("memory", device->gpu, 1ULL << 30);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(Device *device, int kind, unsigned int *mhz)
{
    ENTER(device->gpu);
    WHOLE(device);
    if (kind != 1 && kind != 2) return INVALID_ARGUMENT; /* NVML_CLOCK_SM, NVML_CLOCK_MEM */
    *mhz = kind == 1 ? value_of("sm_clock", device->gpu, 1980) : 2619;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons)
{
    ENTER(device->gpu);
    WHOLE(device);
    *reasons = value_of("throttle", device->gpu, 4);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned int *celsius)
{
    ENTER(device->gpu);
    WHOLE(device);
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = 60;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned int *milliwatts)
{
    ENTER(device->gpu);
    WHOLE(device);
    *milliwatts = value_of("power", device->gpu, 250500);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *millijoules)
{
    ENTER(device->gpu);
    WHOLE(device);
    *millijoules = 5000;
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(Device *device, int way, unsigned int *kilobytes)
{
    ENTER(device->gpu);
    WHOLE(device);
    *kilobytes = 100 + way;
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values)
{
    ENTER(device->gpu);
    WHOLE(device);
    for (int index = 0; index < count; index++) {
        int is_link = (values[index].field == 138 || values[index].field == 139)
                      && values[index].scope == 0xFFFFFFFF; /* NVLINK_THROUGHPUT_DATA_TX and _RX, all links */
        double kibibytes = value_of("nvlink", device->gpu, -1);
        values[index].result = is_link && kibibytes >= 0 ? SUCCESS : NOT_SUPPORTED;
        values[index].value.ull = kibibytes >= 0 ? kibibytes : 0;
    }
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int kind, int counter, unsigned long long *count)
{
    ENTER(device->gpu);
    WHOLE(device);
    if (counter != 0) return INVALID_ARGUMENT; /* NVML_VOLATILE_ECC */
    *count = value_of(kind ? "uncorrected" : "corrected", device->gpu, 0);
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) { ENTER(SYSTEM); *set = registered; return SUCCESS; }

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, void *set)
{
    ENTER(device->gpu);
    if (set != registered || types != 8) return INVALID_ARGUMENT; /* nvmlEventTypeXidCriticalError */
    registered[device->gpu] = 1;
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, EventData *data, unsigned int milliseconds)
{
    const char *path = getenv("NVML_STUB");
    FILE *script = path ? fopen(path, "r") : NULL;
    char line[256];
    int gpu, number, seen = 0, found = 0;
    (void)set, (void)milliseconds;
    while (script && !found && fgets(line, sizeof line, script))
        if (sscanf(line, "xid %d %d", &gpu, &number) == 2 && registered[gpu] && seen++ == xids_told) found = 1;
    if (script) fclose(script);
    if (!found) {
        ENTER(SYSTEM);
        return TIMEOUT;
    }
    xids_told++;
    *data = (EventData){&devices[gpu][0], 8, number, 0xFFFFFFFF, 0xFFFFFFFF};
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(Device *device, Support *support)
{
    ENTER(device->gpu);
    support->supported = told("gpm", NULL, device->gpu, NULL);
    return SUCCESS;
}

int nvmlGpmSampleAlloc(Sample **sample)
{
    ENTER(SYSTEM);
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

int nvmlGpmSampleFree(Sample *sample) { free(sample); return SUCCESS; }

static int take(int gpu, int instance, Sample *sample)
{
    if (!told("gpm", NULL, gpu, NULL)) return NOT_SUPPORTED;
    *sample = (Sample){gpu, instance, ++samples_taken};
    return SUCCESS;
}

int nvmlGpmSampleGet(Device *device, Sample *sample)
{
    ENTER(device->gpu);
    return take(device->gpu, -1, sample);
}

int nvmlGpmMigSampleGet(Device *device, unsigned int instance, Sample *sample)
{
    ENTER(device->gpu);
    if (instance < 1 || (int)instance > count_of("mig", device->gpu, 0)) return INVALID_ARGUMENT;
    return take(device->gpu, (int)instance - 1, sample);
}

/* Metric NUMBER of GPU is NUMBER + GPU (in per cent or MiB/s), of an instance half of that. */
int nvmlGpmMetricsGet(MetricsGet *wanted)
{
    double code;
    char number[16];
    ENTER(wanted->first->gpu);
    if (wanted->version != 1 || wanted->first->gpu != wanted->second->gpu) return INVALID_ARGUMENT;
    if (!wanted->first->taken || wanted->second->taken <= wanted->first->taken) return INVALID_ARGUMENT;
    for (unsigned int index = 0; index < wanted->count; index++) {
        Metric *metric = &wanted->metrics[index];
        snprintf(number, sizeof number, "%u", metric->id);
        metric->result = told("metric", NULL, (int)metric->id, &code) ? (unsigned int)code : SUCCESS;
        metric->value = value_of(number, wanted->first->gpu, metric->id + wanted->first->gpu);
        if (wanted->first->instance >= 0) metric->value /= 2;
    }
    return SUCCESS;
}
