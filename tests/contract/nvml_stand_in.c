/* A libnvidia-ml.so.1 for tests, told by the environment what to answer:
 *   NVML_DEVICES   uuid:major:minor:mig[;...]   mig: - (not supported), 0 (off), or 1 + number of partitions (1.N)
 *   NVML_FAILS     function=code                the one function that refuses, and how
 * A partition's UUID is "MIG-" followed by that of its device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char uuid[96]; int major, minor, mig, partitions; } device;
static device devices[16];
static unsigned count;
static int initialised;

static int fails(const char *function) {
    const char *told = getenv("NVML_FAILS"), *equals = told ? strchr(told, '=') : NULL;
    if (equals && strlen(function) == (size_t)(equals - told) && !strncmp(told, function, equals - told))
        return atoi(equals + 1);
    return initialised || !strncmp(function, "nvmlInit", 8) ? 0 : 1;
}
#define ASK(name) do { int code = fails(name); if (code) return code; } while (0)

static int initialise(const char *function) {
    ASK(function);
    const char *told = getenv("NVML_DEVICES");
    char *copy = strdup(told ? told : ""), *rest = copy, *word;
    for (count = 0; (word = strsep(&rest, ";")) && *word; count++) {
        device *d = &devices[count];
        char mig[8] = "-";
        sscanf(word, "%95[^:]:%d:%d:%7s", d->uuid, &d->major, &d->minor, mig);
        d->mig = mig[0] == '-' ? -1 : mig[0] - '0';
        d->partitions = strlen(mig) > 2 ? atoi(mig + 2) : 0;
    }
    free(copy);
    initialised = 1;
    return 0;
}
int nvmlInit_v2(void) { return initialise("nvmlInit_v2"); }
int nvmlInit(void) { return initialise("nvmlInit_v2"); }
int nvmlShutdown(void) { initialised = 0; return 0; }
const char *nvmlErrorString(int code) { return code == 4 ? "Insufficient Permissions" : "Some Error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { ASK("nvmlDeviceGetCount_v2"); *n = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device **d) {
    ASK("nvmlDeviceGetHandleByIndex_v2");
    if (i >= count) return 2;
    *d = &devices[i];
    return 0;
}
int nvmlDeviceGetUUID(device *d, char *out, unsigned n) {
    ASK("nvmlDeviceGetUUID");
    snprintf(out, n, "%s", d->uuid);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(device *d, int *major, int *minor) {
    ASK("nvmlDeviceGetCudaComputeCapability");
    *major = d->major;
    *minor = d->minor;
    return 0;
}
int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    ASK("nvmlDeviceGetMigMode");
    if (d->mig < 0) return 3;
    *current = *pending = d->mig;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *n) { *n = d->mig > 0 ? 7 : 0; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned i, device **out) {
    /* Slots fill from the last one, so that an empty slot comes first. */
    if ((int)i < 7 - d->partitions) return 6;
    *out = d;
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device **out) {
    ASK("nvmlDeviceGetHandleByUUID");
    for (unsigned i = 0; i < count; i++)
        if (!strncmp(uuid, "MIG-", 4) && !strcmp(uuid + 4, devices[i].uuid)) { *out = &devices[i]; return 0; }
    return 6;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device *d, device **out) { *out = d; return 0; }
